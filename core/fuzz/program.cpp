// libFuzzer target: decodes, checks, walks and traces a program of a few ranks from arbitrary bytes, like `apportion
// verify`. `make fuzz-core` builds and runs it, from the programs in corpus/.
//
//   ranks u8 · flags u8: 1 backward, 2 walked together, 4 with a layer's projection
//   each rank: home rows u16, size of its part u16, its part: the seven tables of the program
#include <algorithm>
#include <cstdlib>

#include "ir/verify/judge.hpp"
#include "ir/wellformed.hpp"

namespace {

using namespace apportion;
using std::int64_t;

constexpr int64_t MOST_RANKS = 4, FARTHEST = (int64_t{1} << 30) - 1;
constexpr int64_t SOME = int64_t{1} << 48;  // `LIMIT` of apportion/ir/isa.py
const std::vector<int64_t> COLUMNS = {3, 6, 5, 3, 6, 9, 5};

// Lowest and highest value of each column, for plans of MOST_RANKS ranks and two head sets besides all heads.
const std::vector<int64_t> RANGES = {
    1, 9,   1, SOME, 0, 65535,                                                        // arenas
    0, 9,   0, 1,    0, SOME,  0, SOME, 0,     65535, 0, 2,                           // operands
    1, 13,  0, SOME, 0, SOME,  0, 3,    0,     SOME,                                  // instructions
    0, 1,   0, MOST_RANKS - 1, 0, SOME,                                               // transfers
    0, SOME, 0, SOME, 0, SOME, -SOME, SOME, -SOME, SOME, 0, 1,                        // tasks
    0, SOME, 0, SOME, 0, SOME, 0, SOME, 0, SOME, 0, SOME, -SOME, SOME, -SOME, SOME, 0, 3,  // grads
    0, SOME, 0, SOME, 0, SOME, 0, SOME, 0, 1,                                         // rowops
};

// Four query heads on two KV heads: all of them, the first two, the last two, which are no KV heads.
struct Heads {
  int64_t bits[2][3] = {{0b1111, 0b0011, 0b1100}, {0b11, 0b11, 0}};
  int64_t number[2][3] = {{0, 1, 2}, {0, 0, 2}}, size[2][3] = {{4, 2, 2}, {2, 2, 2}};
  bool serves[3][3] = {{true, true, false}, {true, true, false}, {true, true, false}};
  bool foreign[3] = {false, false, true};

  verify::HeadSets sets() const {
    const auto matrix = [](const int64_t(&of)[2][3]) { return Matrix<const int64_t>(&of[0][0], 2, 3, 3); };
    return {matrix(bits), matrix(number), matrix(size), {&serves[0][0], 3, 3, 3}};
  }
};
const Heads HEADS;

// Decoded input: the tables of all ranks, and their memory sizes.
class Input {
 public:
  // Throws Truncated, Malformed.
  explicit Input(Reader bytes) {
    ranks_ = bytes.byte() % MOST_RANKS + 1;
    flags_ = bytes.byte();
    const auto u16 = [&] { return int64_t{bytes.byte()} | int64_t{bytes.byte()} << 8; };
    std::vector<std::vector<Found>> found;
    for (int64_t rank = 0; rank < ranks_; ++rank) {
      home_rows_.push_back(u16());
      first_address_.push_back(rank == 0 ? 0 : first_address_.back() + home_rows_[static_cast<std::size_t>(rank) - 1]);
      const int64_t size = u16();
      found.push_back(scan_part(Reader(bytes.take(size), size), COLUMNS, rank));
    }
    for (std::size_t table = 0; table < COLUMNS.size(); ++table) {
      std::vector<int64_t>& ptr = ptr_.emplace_back(1, 0);
      for (const auto& own : found) ptr.push_back(ptr.back() + own[table].rows);
      std::vector<int64_t>& values = values_.emplace_back(static_cast<std::size_t>(COLUMNS[table] * ptr.back()));
      const Matrix<int64_t> matrix(values.data(), COLUMNS[table], ptr.back(), ptr.back());
      for (std::size_t rank = 0; rank < found.size(); ++rank)
        read_rows(found[rank][table], static_cast<int64_t>(rank), static_cast<int64_t>(table), FAR, ptr[rank], matrix);
    }
  }

  int64_t ranks() const { return ranks_; }
  bool is_backward() const { return (flags_ & 1) != 0; }
  bool is_together() const { return (flags_ & 2) != 0; }
  bool projects() const { return (flags_ & 4) != 0; }
  verify::Offsets offsets(std::size_t table) const { return {ptr_[table].data(), ranks_ + 1}; }
  IntRows rows(std::size_t table) const {
    const int64_t count = ptr_[table].back();
    return {values_[table].data(), false, COLUMNS[table], count, count};
  }
  verify::Offsets home_rows() const { return {home_rows_.data(), ranks_}; }
  verify::Offsets first_address() const { return {first_address_.data(), ranks_}; }

 private:
  int64_t ranks_;
  std::uint8_t flags_;
  std::vector<int64_t> home_rows_, first_address_;
  std::vector<std::vector<int64_t>> ptr_, values_;
};

bool is_wellformed(const Input& input) {
  ProgramTables program{{},
                        {RANGES.data(), static_cast<int64_t>(RANGES.size()) / 2, 2, 2},
                        {HEADS.foreign, 3}};
  for (std::size_t table = 0; table < COLUMNS.size(); ++table)
    program.tables.push_back({input.offsets(table), input.rows(table)});
  if (refusal(program)) return false;
  const IntRows transfers = input.rows(3);
  for (int64_t row = 0; row < transfers.columns(); ++row)
    if (transfers[1][row] >= input.ranks()) return false;
  return true;
}

// As `_prepared` of apportion/ir/verify/walk/judge.py: excludes programs that are too large or of the other phase.
bool is_followed(const Input& input, int64_t rounds) {
  for (const std::size_t table : {1, 2, 3, input.is_backward() ? 5 : 4, 6}) {
    const IntRows rows = input.rows(table);
    for (int64_t column = 0; column < rows.rows(); ++column)
      for (int64_t row = 0; row < rows.columns(); ++row)
        if (std::abs(rows[column][row]) > FARTHEST) return false;
  }
  const Ints op = input.rows(2)[0];
  for (int64_t row = 0; row < op.size(); ++row) {
    const Op own = static_cast<Op>(op[row]);
    if (input.is_backward() ? own == Op::ATTEND || own == Op::PROJECT || own == Op::FINISH
                            : own == Op::ATTEND_GRAD || own == Op::DELTA || own == Op::PROJECT_GRAD)
      return false;
  }
  return rounds <= 8 * op.size() + 1025 && input.rows(input.is_backward() ? 4 : 5).columns() == 0;
}

// Rows or heads of each rank's arenas, [ranks, tensors].
std::vector<int64_t> arenas(const Input& input, int64_t column) {
  std::vector<int64_t> found(static_cast<std::size_t>(input.ranks() * TENSORS));
  const IntRows rows = input.rows(0);
  for (int64_t rank = 0; rank < input.ranks(); ++rank)
    for (int64_t row = input.offsets(0)[rank]; row < input.offsets(0)[rank + 1]; ++row)
      found[static_cast<std::size_t>(rank * TENSORS + rows[0][row])] = rows[column][row];
  return found;
}

void verify_program(const Input& input) {
  int64_t rounds = 1;
  const IntRows instructions = input.rows(2), transfers = input.rows(3), rowops = input.rows(6);
  for (int64_t row = 0; row < instructions.columns(); ++row) rounds = std::max(rounds, instructions[1][row] + 1);
  if (!is_followed(input, rounds)) return;
  const std::vector<int64_t> arena_rows = arenas(input, 1), arena_heads = arenas(input, 2);
  const auto matrix = [&](const std::vector<int64_t>& of) {
    return Matrix<const int64_t>(of.data(), input.ranks(), TENSORS, TENSORS);
  };
  verify::Program program;
  program.operands = {input.rows(1), input.offsets(1)};
  program.instructions = {instructions[0], instructions[1], instructions[2], instructions[3], instructions[4],
                          input.offsets(2)};
  program.transfers = {transfers[0], transfers[1], transfers[2], input.offsets(3)};
  const IntRows tasks = input.rows(input.is_backward() ? 5 : 4);
  program.tasks = input.is_backward()
                      ? verify::Tasks{tasks[0], tasks[1], tasks[4], tasks[2], tasks[3], tasks[5], tasks[6], tasks[7],
                                      tasks[8], input.offsets(5)}
                      : verify::Tasks{tasks[0], tasks[1], tasks[2], {}, {}, {}, tasks[3], tasks[4], tasks[5],
                                      input.offsets(4)};
  program.rowops = {rowops[0], rowops[1], rowops[2], rowops[3], rowops[4], input.offsets(6)};
  program.memory = {input.home_rows(), input.first_address(), matrix(arena_rows), matrix(arena_heads)};
  program.heads = HEADS.sets();
  const Tensors inputs = input.projects() ? Tensors::of(Tensor::X) : Tensors::of(Tensor::Q, Tensor::KV);
  const Tensors gradients = input.projects() ? Tensors::of(Tensor::DX) : Tensors::of(Tensor::DQ, Tensor::DKV);
  const Tensors of_backward = Tensors::of(Tensor::DX, Tensor::DQ, Tensor::DKV, Tensor::DO, Tensor::DELTA);
  program.is_backward = input.is_backward();
  program.given = program.is_backward ? Tensors(inputs.bits() | Tensors::of(Tensor::O, Tensor::DO).bits()) : inputs;
  program.owed = program.is_backward ? Tensors(gradients.bits() | Tensors::of(Tensor::DELTA).bits())
                                     : Tensors::of(Tensor::O);
  program.foreign = program.is_backward ? Tensors(0) : of_backward;
  program.rounds = rounds;

  constexpr int64_t MOST_PIECES = 1 << 12;
  verify::Lists lists(3);
  lists.begin(tasks.columns());
  const verify::Judged judged = judge(program, lists, input.is_together(), {1, 64, MOST_PIECES});
  if (judged.verdict == verify::Verdict::RIGHT) lists.end();
  try {
    const verify::Trace trace = verify::trace(program, MOST_PIECES);
    if (judged.verdict == verify::Verdict::RIGHT && !trace.faults.empty()) std::abort();
  } catch (const verify::TooMany&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const Input input(Reader(data, static_cast<int64_t>(size)));
    if (is_wellformed(input)) verify_program(input);
  } catch (const std::invalid_argument&) {  // Malformed
  } catch (const Truncated&) {
  }
  return 0;
}
