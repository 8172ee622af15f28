// libFuzzer target: decodes, checks, walks and traces a program of a few ranks from arbitrary bytes, like `apportion
// verify`. `make fuzz-core` builds it and runs it from the programs in corpus/.
//
//   ranks u8 · flags u8: 1 backward, 2 ranks walked together, 4 with a layer's projection
//   for each rank: home rows u16, size of its part u16, its part: the seven tables of the program
#include <cstdlib>

#include "ir/verify/judge.hpp"
#include "ir/tables.hpp"

namespace {

using namespace apportion;

constexpr int64_t MAX_RANKS = 4, FARTHEST = (int64_t{1} << 30) - 1;
constexpr int64_t SOME = int64_t{1} << 48;  // `LIMIT` of apportion/ir/isa.py
const std::vector<int64_t> COLUMNS = {3, 6, 5, 3, 6, 9, 5};

// The lowest and highest value of each column, for plans of MAX_RANKS ranks with two head sets besides all heads.
const std::vector<int64_t> RANGES = {
    1, 9,   1, SOME, 0, 65535,                                                        // arenas
    0, 9,   0, 1,    0, SOME,  0, SOME, 0,     65535, 0, 2,                           // operands
    1, 13,  0, SOME, 0, SOME,  0, 3,    0,     SOME,                                  // instructions
    0, 1,   0, MAX_RANKS - 1, 0, SOME,                                                // transfers
    0, SOME, 0, SOME, 0, SOME, -SOME, SOME, -SOME, SOME, 0, 1,                        // tasks
    0, SOME, 0, SOME, 0, SOME, 0, SOME, 0, SOME, 0, SOME, -SOME, SOME, -SOME, SOME, 0, 3,  // grads
    0, SOME, 0, SOME, 0, SOME, 0, SOME, 0, 1,                                         // rowops
};

constexpr std::size_t PEER = 2 * (3 + 6 + 5 + 1) + 1;  // index of the highest peer

// Head sets for four query heads and two KV heads: all heads, the first two, and the last two, which no KV heads match.
struct Heads {
  int64_t bits[2][3] = {{0b1111, 0b0011, 0b1100}, {0b11, 0b11, 0}};
  int64_t number[2][3] = {{0, 1, 2}, {0, 0, 2}}, size[2][3] = {{4, 2, 2}, {2, 2, 2}};
  bool serves[3][3] = {{true, true, false}, {true, true, false}, {true, true, false}};
  bool foreign[3] = {false, false, true};

  verify::HeadSets sets() const {
    const auto matrix = [](const int64_t(&values)[2][3]) { return Matrix<const int64_t>(&values[0][0], 2, 3, 3); };
    return {matrix(bits), matrix(number), matrix(size), {&serves[0][0], 3, 3, 3}};
  }
};
const Heads HEADS;

// Decoded input: the tables of all ranks and their memory sizes.
class Input {
 public:
  // Throws Truncated, Malformed.
  explicit Input(Reader bytes) {
    ranks_ = bytes.byte() % MAX_RANKS + 1;
    flags_ = bytes.byte();
    const auto u16 = [&] { return int64_t{bytes.byte()} | int64_t{bytes.byte()} << 8; };
    std::vector<std::vector<ScannedTable>> parts;
    for (int64_t rank = 0; rank < ranks_; ++rank) {
      home_rows_.push_back(u16());
      first_address_.push_back(rank == 0 ? 0 : first_address_.back() + home_rows_[static_cast<std::size_t>(rank) - 1]);
      const int64_t size = u16();
      parts.push_back(scan_part(Reader(bytes.take(size), size), COLUMNS, rank));
    }
    for (std::size_t table = 0; table < COLUMNS.size(); ++table) {
      std::vector<int64_t>& ptr = ptr_.emplace_back(1, 0);
      for (const auto& part : parts) ptr.push_back(ptr.back() + part[table].rows);
      std::vector<int64_t>& values = values_.emplace_back(static_cast<std::size_t>(COLUMNS[table] * ptr.back()));
      const Matrix<int64_t> matrix(values.data(), COLUMNS[table], ptr.back(), ptr.back());
      for (std::size_t rank = 0; rank < parts.size(); ++rank)
        read_rows(parts[rank][table], static_cast<int64_t>(rank), static_cast<int64_t>(table), FAR, ptr[rank], matrix);
    }
  }

  int64_t ranks() const { return ranks_; }
  bool is_backward() const { return (flags_ & 1) != 0; }
  bool is_together() const { return (flags_ & 2) != 0; }
  bool projects() const { return (flags_ & 4) != 0; }
  std::vector<Table> tables() const {
    std::vector<Table> views;
    for (std::size_t table = 0; table < COLUMNS.size(); ++table) {
      const int64_t count = ptr_[table].back();
      views.push_back({{ptr_[table].data(), ranks_ + 1}, {values_[table].data(), false, COLUMNS[table], count, count}});
    }
    return views;
  }
  Column<const int64_t> home_rows() const { return {home_rows_.data(), ranks_}; }
  Column<const int64_t> first_address() const { return {first_address_.data(), ranks_}; }

 private:
  int64_t ranks_;
  uint8_t flags_;
  std::vector<int64_t> home_rows_, first_address_;
  std::vector<std::vector<int64_t>> ptr_, values_;
};

bool is_wellformed(const Input& input) {
  const std::vector<Table> tables = input.tables();
  std::vector<int64_t> ranges = RANGES;
  ranges[PEER] = input.ranks() - 1;
  return !refusal(tables, {ranges.data(), static_cast<int64_t>(ranges.size()) / 2, 2, 2}, {HEADS.foreign, 3});
}

// Like `_fields` in apportion/ir/verify/walk/judge.py: excludes programs that are too large or have ops of the other
// phase.
bool is_followed(const Input& input, const std::vector<Table>& tables, int64_t rounds) {
  for (const std::size_t table : {1, 2, 3, input.is_backward() ? 5 : 4, 6}) {
    const IntRows& rows = tables[table].columns;
    for (int64_t column = 0; column < rows.rows(); ++column)
      for (int64_t row = 0; row < rows.columns(); ++row)
        if (std::abs(rows[column][row]) > FARTHEST) return false;
  }
  const Ints op = tables[2].columns[0];
  for (int64_t row = 0; row < op.size(); ++row) {
    const Op code = static_cast<Op>(op[row]);
    if (input.is_backward() ? code == Op::ATTEND || code == Op::PROJECT || code == Op::FINISH
                            : code == Op::ATTEND_GRAD || code == Op::DELTA || code == Op::PROJECT_GRAD)
      return false;
  }
  return rounds <= 8 * op.size() + 1025 && tables[input.is_backward() ? 4 : 5].size() == 0;
}

// The rows or heads of each rank's arenas, [ranks, tensors].
Array2<int64_t> arenas(const Input& input, const Table& table, int64_t column) {
  Array2<int64_t> sizes(input.ranks(), TENSORS);
  for (int64_t rank = 0; rank < input.ranks(); ++rank)
    for (int64_t row = table.ptr[rank]; row < table.ptr[rank + 1]; ++row)
      sizes[rank][table.columns[0][row]] = table.columns[column][row];
  return sizes;
}

void verify_program(const Input& input) {
  const std::vector<Table> tables = input.tables();
  const Programs programs(tables);
  int64_t rounds = 1;
  for (int64_t row = 0; row < programs.round.size(); ++row) rounds = std::max(rounds, programs.round[row] + 1);
  if (!is_followed(input, tables, rounds)) return;
  const Array2<int64_t> arena_rows = arenas(input, tables[0], 1), arena_heads = arenas(input, tables[0], 2);
  const auto view = [](const Array2<int64_t>& array) {
    return Matrix<const int64_t>(array.data(), array.rows(), array.columns(), array.columns());
  };
  const Tensors inputs = input.projects() ? Tensors::of(Tensor::X) : Tensors::of(Tensor::Q, Tensor::KV);
  const Tensors gradients = input.projects() ? Tensors::of(Tensor::DX) : Tensors::of(Tensor::DQ, Tensor::DKV);
  const Tensors backward_only = Tensors::of(Tensor::DX, Tensor::DQ, Tensor::DKV, Tensor::DO, Tensor::DELTA);
  const bool backward = input.is_backward();
  const verify::Program program{
      programs, {input.home_rows(), input.first_address(), view(arena_rows), view(arena_heads)}, HEADS.sets(),
      backward ? Tensors(inputs.bits() | Tensors::of(Tensor::O, Tensor::DO).bits()) : inputs,
      backward ? Tensors(gradients.bits() | Tensors::of(Tensor::DELTA).bits()) : Tensors::of(Tensor::O),
      backward ? Tensors(0) : backward_only, backward, rounds};

  constexpr int64_t MAX_PIECES = 1 << 12;
  verify::Lists lists(3);
  lists.begin(program.task_list.size());
  const verify::Judgement judgement = judge(program, lists, input.is_together(), {1, 64, MAX_PIECES});
  if (judgement.verdict != verify::Verdict::RIGHT) return void(verify::trace(program, MAX_PIECES));
  lists.end();
  if (const auto trace = verify::trace(program, MAX_PIECES); trace && !trace->faults.empty()) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  try {
    const Input input(Reader(data, static_cast<int64_t>(size)));
    if (is_wellformed(input)) verify_program(input);
  } catch (const std::invalid_argument&) {  // Malformed
  } catch (const Truncated&) {
  }
  return 0;
}
