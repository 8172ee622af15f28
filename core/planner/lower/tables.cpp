// Writes a program as the tables of all ranks.
//
//   sorted     the rows of each list, sorted by rank and step; rows of one rank and step keep their given order
//   tables     rank after rank: the columns of its lists; the distinct operands that these name, numbered in the order
//              in which they are first found, list after list, column after column (`OPERAND_COLUMNS` of
//              apportion/ir/isa.py), an order that the format stores in few bytes; arenas as large as the operands in
//              work rows require
//
// A rank takes part in a step if it has rows in it, if it waits there for something that it launched, or if the step is
// an all-to-all. All ranks run the steps in the same order, so rounds are launched in the same order everywhere, which
// rules out deadlock.
#include <string_view>

#include "bind.hpp"
#include "planner/lower/phase.hpp"

namespace apportion::lower {

namespace {

// ptr: the first row of each rank.
template <class Row>
class RowOrder {
 public:
  // Adds the number of rows of each rank at each step to `count`.
  RowOrder(const Growing<Row>& rows, Matrix<int64_t> count) : ptr(count.rows() + 1), rows_(rows), order_(rows.count()) {
    const int64_t ranks = count.rows(), steps = count.columns();
    Growing<int32_t> place(ranks * steps + 1);
    for (const Row& row : rows) ++place[row.rank * steps + row.step + 1];
    for (int64_t rank = 0; rank < ranks; ++rank) {
      for (int64_t step = 0; step < steps; ++step) {
        const int64_t key = rank * steps + step;
        count[rank][step] += place[key + 1];
        place[key + 1] += place[key];
      }
      ptr[rank + 1] = place[(rank + 1) * steps];
    }
    for (int32_t row = 0; row < rows.count(); ++row) order_[place[rows[row].rank * steps + rows[row].step]++] = row;
  }
  Growing<int64_t> ptr;
  const Row& operator[](int64_t at) const { return rows_[order_[at]]; }

 private:
  const Growing<Row>& rows_;
  Growing<int32_t> order_;
};

// Operands that one rank's rows have named so far. Memory is reused for all ranks: an entry is valid only if it carries
// the current rank.
class NamedRanges {
 public:
  void open(int64_t rank) {
    rank_ = narrow(rank);
    ranges_.clear();
  }
  // The index of a range among the rank's distinct ranges; -1 for an absent operand.
  int32_t find(const Operand& key) {
    if (key.none()) return -1;
    Slot& slot = slots_[place_of(key)];
    if (slot.rank == rank_) return slot.range;
    slot = {rank_, narrow(ranges_.count())};
    ranges_.push_back(key);
    if (2 * ranges_.count() > slots_.count()) grow();
    return narrow(ranges_.count() - 1);
  }
  // The index, among the operands of all ranks, of the operand with a range and a tensor. It is below the rank's first
  // index if the rank has no such operand yet.
  int32_t& number(int64_t range, Tensor tensor) { return number_[range * TENSORS + static_cast<int64_t>(tensor)]; }
  Operand operand(int64_t range, Tensor tensor) const { return ranges_[range].of(tensor); }

 private:
  struct Slot {
    int32_t rank = -1, range = -1;
  };
  int64_t place_of(const Operand& key) const {
    const int64_t mask = slots_.count() - 1;
    int64_t at = static_cast<int64_t>(hash(key)) & mask;
    while (slots_[at].rank == rank_ && !ranges_[slots_[at].range].same_rows(key)) at = (at + 1) & mask;
    return at;
  }
  // The middle bits of a product, since row numbers are multiples of various numbers (Knuth, vol. 3, section 6.4).
  static uint64_t hash(const Operand& key) {
    const auto bits = static_cast<uint64_t>(key.row()) << 32 ^ static_cast<uint64_t>(key.rows()) << 1 ^
                      static_cast<uint64_t>(key.space()) ^ static_cast<uint64_t>(key.heads()) << 48;
    return (bits ^ bits >> 29) * 0x9E3779B97F4A7C15u >> 32;
  }
  void grow() {
    const int64_t twice = 2 * slots_.count();
    slots_ = Growing<Slot>(twice);
    number_.resize(static_cast<std::size_t>(twice * TENSORS), -1);
    for (int64_t range = 0; range < ranges_.count(); ++range) slots_[place_of(ranges_[range])] = {rank_, narrow(range)};
  }

  int32_t rank_ = -1;
  Growing<Slot> slots_ = Growing<Slot>(256);
  Growing<Operand> ranges_;
  Growing<int32_t> number_ = Growing<int32_t>(256 * TENSORS, -1);
};

enum Table { ARENAS, OPERANDS, INSTRUCTIONS, TRANSFERS, TASKS, GRADS, ROWOPS, TABLES };  // as in `isa.TABLES`

class Writer {
 public:
  Writer(const Program& program, const Lowering& low, bool backward)
      : program_(program), low_(low), backward_(backward) {
    for (Growing<int64_t>& offsets : ptr) offsets = Growing<int64_t>(count_.rows() + 1);
    ptr[TRANSFERS] = transfers_.ptr;
    ptr[backward ? GRADS : TASKS] = attention_.ptr;
    ptr[ROWOPS] = rowops_.ptr;
    for (int64_t rank = 0; rank < count_.rows(); ++rank) {
      ptr[INSTRUCTIONS][rank + 1] = ptr[INSTRUCTIONS][rank];
      for (int64_t step = 0; step < steps_.count(); ++step) ptr[INSTRUCTIONS][rank + 1] += has(rank, step);
    }
  }

  std::array<Growing<int64_t>, TABLES> ptr;  // where the rows of each rank begin
  int64_t rows(Table table) const { return ptr[table].back(); }

  void write(Matrix<int32_t> instructions, Matrix<int32_t> transfers, Matrix<int32_t> attention,
             Matrix<int32_t> rowops) {
    operands_.expect(count_.rows() + rows(TRANSFERS) + 3 * rows(TASKS) + 6 * rows(GRADS) + 4 * rows(ROWOPS));
    for (int64_t rank = 0; rank < count_.rows(); ++rank) {
      first_ = narrow(operands_.count());
      operands_.push_back({});  // none
      ranges_.open(rank);
      reach_.fill(0);
      write_instructions(rank, instructions);
      write_transfers(rank, transfers);
      write_attention(rank, attention);
      write_rowops(rank, rowops);
      for (int64_t tensor = 0; tensor < TENSORS; ++tensor)
        if (const int64_t rows = reach_[static_cast<std::size_t>(tensor)]; rows > 0)
          arenas_.push_back({tensor, rows, columns_of(static_cast<Tensor>(tensor), rank)});
      ptr[ARENAS][rank + 1] = arenas_.count();
      ptr[OPERANDS][rank + 1] = operands_.count();
    }
  }
  void write_arenas(Matrix<int64_t> out) const {
    for (int64_t at = 0; at < arenas_.count(); ++at) {
      out[0][at] = arenas_[at].tensor;
      out[1][at] = arenas_[at].rows;
      out[2][at] = arenas_[at].columns;
    }
  }
  // All operands begin at head column 0.
  void write_operands(Matrix<int32_t> out) const {
    for (int64_t at = 0; at < operands_.count(); ++at) {
      const Operand& operand = operands_[at];
      const int32_t row[] = {static_cast<int32_t>(operand.tensor()), static_cast<int32_t>(operand.space()), operand.row(),
                             operand.rows(), 0, operand.heads()};
      for (int64_t column = 0; column < 6; ++column) out[column][at] = row[column];
    }
  }

 private:
  struct Arena {
    int64_t tensor, rows, columns;
  };
  // An operand of a row: the index of one of the rank's distinct ranges, and a tensor.
  struct NamedOperand {
    int32_t range;
    Tensor tensor;
  };

  bool has(int64_t rank, int64_t step) const {
    const int64_t source = steps_[step].launch >= 0 ? steps_[step].launch : step;
    return count_[rank][source] > 0 || (steps_[source].mode & ALL_TO_ALL) != 0;
  }
  // The number of head columns of an arena; that of the widest stage if heads are computed in stages.
  int64_t columns_of(Tensor tensor, int64_t rank) const {
    if (!low_.stages) return (KV_SIDE.has(tensor) ? low_.sets.key_columns : low_.sets.query_heads)[rank];
    return KV_SIDE.has(tensor) ? low_.stages->widest : low_.stages->query_heads;
  }

  void write_instructions(int64_t rank, Matrix<int32_t> out) {
    int64_t at = ptr[INSTRUCTIONS][rank];
    for (int64_t number = 0; number < steps_.count(); ++number) {
      if (!has(rank, number)) continue;
      const Step& step = steps_[number];
      const int64_t row[] = {static_cast<int64_t>(step.op), step.round, step.channel, step.mode, count_[rank][number]};
      for (int64_t column = 0; column < 5; ++column) out[column][at] = narrow(row[column]);
      ++at;
    }
  }
  void write_transfers(int64_t rank, Matrix<int32_t> out) {
    each(transfers_, rank, [&](const Transfer& row, int64_t at, int64_t place) {
      out[0][at] = row.send;
      out[1][at] = row.peer;
      name(0, place, row.operand);
    });
    number(transfers_, rank, 0, out[2]);
  }
  void write_attention(int64_t rank, Matrix<int32_t> out) {
    const int64_t operands = backward_ ? 6 : 3;
    each(attention_, rank, [&](const Attention& row, int64_t at, int64_t place) {
      out[operands][at] = row.dmin;
      out[operands + 1][at] = row.dmax;
      out[operands + 2][at] = row.first;
      name(0, place, row.queries);
      name(1, place, row.keys);
      name(2, place, row.query_sums);
      if (backward_) name(3, place, row.key_sums);
    });
    int64_t column = 0;
    number(attention_, rank, 0, out[column++]);
    number(attention_, rank, 1, out[column++]);
    if (backward_) {
      number(attention_, rank, 0, out[column++], Tensor::DO);
      number(attention_, rank, 0, out[column++], Tensor::DELTA);
    }
    number(attention_, rank, 2, out[column++]);
    if (backward_) number(attention_, rank, 3, out[column++]);
  }
  void write_rowops(int64_t rank, Matrix<int32_t> out) {
    each(rowops_, rank, [&](const RowOp& row, int64_t at, int64_t place) {
      out[4][at] = row.first;
      name(0, place, row.a);
      name(1, place, row.b);
      name(2, place, row.c);
      name(3, place, row.d);
    });
    for (int64_t column = 0; column < 4; ++column) number(rowops_, rank, column, out[column]);
  }

  // Calls fill(row, at, place) with each row of a rank. at: its index among the rows of all ranks; place: its index
  // among the rank's own rows.
  template <class Row, class Fill>
  void each(const RowOrder<Row>& list, int64_t rank, Fill&& fill) {
    const int64_t first = list.ptr[rank], end = list.ptr[rank + 1];
    for (Growing<NamedOperand>& column : named_) column.resize(static_cast<std::size_t>(end - first));
    for (int64_t at = first; at < end; ++at) fill(list[at], at, at - first);
  }
  void name(std::size_t column, int64_t place, const Operand& operand) {
    named_[column][place] = {ranges_.find(operand), operand.tensor()};
  }
  // Writes the numbers of the operands that `name` recorded in a column. tensor: of all rows; if NONE, each row has
  // its own.
  template <class Row>
  void number(const RowOrder<Row>& list, int64_t rank, int64_t column, Column<int32_t> out,
              Tensor tensor = Tensor::NONE) {
    int64_t at = list.ptr[rank];
    for (const NamedOperand& entry : named_[static_cast<std::size_t>(column)]) {
      int32_t& target = out[at++];
      if (entry.range < 0) {
        target = 0;
        continue;
      }
      const Tensor kind = tensor == Tensor::NONE ? entry.tensor : tensor;
      int32_t& cached = ranges_.number(entry.range, kind);
      if (cached <= first_) {
        cached = narrow(operands_.count());
        operands_.push_back(ranges_.operand(entry.range, kind));
        int64_t& reach = reach_[static_cast<std::size_t>(kind)];
        reach = std::max(reach, operands_.back().reach());
      }
      target = cached - first_;
    }
  }

  const Program& program_;
  const Growing<Step>& steps_ = program_.steps;
  const Lowering& low_;
  bool backward_;
  Array2<int64_t> count_{low_.groups.ranks(), steps_.count()};  // rows of each rank at each step
  RowOrder<Transfer> transfers_{program_.transfers, count_};
  RowOrder<Attention> attention_{program_.attention, count_};
  RowOrder<RowOp> rowops_{program_.rowops, count_};
  Growing<Operand> operands_;
  Growing<Arena> arenas_;
  NamedRanges ranges_;
  std::array<Growing<NamedOperand>, 4> named_;      // the columns of one list of one rank
  int32_t first_ = 0;                        // the rank's first operand
  std::array<int64_t, TENSORS> reach_{};    // for each tensor, the end of the work rows that the rank names
};

// (rows, steps, tables): each table as (ptr, values). If one rank has more work rows, or all ranks together more steps,
// than tables can number, there are no tables, and rows or steps is that count. network: None to leave rounds
// unchanged.
nb::object tables_of(nb::handle lowering, nb::str phase, nb::object network) {
  Opener opener;
  const auto low = opener.open<Lowering>(lowering, "lowering");
  const auto between = opener.open<std::unique_ptr<const Network>>(network, "network");
  const bool backward = std::string_view(phase.c_str()) == "backward";
  Program program;
  std::unique_ptr<Writer> writer;
  try {
    without_gil([&] {
      program = lower_phase(low, backward);
      if (between) bound_senders(program, low, *between);
      if (const int64_t all = low.groups.ranks() * program.steps.count(); all >= LIMIT) throw TooLarge{0, all};
      writer = std::make_unique<Writer>(program, low, backward);
    });
  } catch (const TooLarge& error) {
    return nb::make_tuple(error.rows, error.steps, nb::list());
  }
  constexpr int64_t COLUMNS[] = {3, 6, 5, 3, 6, 9, 5};
  const auto new_table = [&](Table table) { return NewArray<Matrix<int32_t>>(COLUMNS[table], writer->rows(table)); };
  const NewArray<Matrix<int32_t>> instructions = new_table(INSTRUCTIONS), transfers = new_table(TRANSFERS),
                      tasks = new_table(TASKS), grads = new_table(GRADS), rowops = new_table(ROWOPS);
  without_gil([&] { writer->write(instructions, transfers, backward ? grads : tasks, rowops); });
  const NewArray<Matrix<int64_t>> arenas(COLUMNS[ARENAS], writer->rows(ARENAS));
  const NewArray<Matrix<int32_t>> operands = new_table(OPERANDS);
  without_gil([&] {
    writer->write_arenas(arenas);
    writer->write_operands(operands);
  });
  const nb::object arrays[] = {arenas.array(), operands.array(), instructions.array(), transfers.array(),
                               tasks.array(),  grads.array(),    rowops.array()};
  nb::list tables;
  for (std::size_t table = 0; table < TABLES; ++table) {
    const Growing<int64_t>& rows = writer->ptr[table];
    const NewArray<Column<int64_t>> ptr(rows.count());  // owned by numpy, so nothing else can write to it
    std::copy(rows.begin(), rows.end(), ptr.begin());
    tables.append(nb::make_tuple(ptr.array(), arrays[table]));
  }
  return nb::make_tuple(0, 0, tables);
}

}  // namespace

static const Area area("lower", [](nb::module_& m) {
  m.def("tables", &tables_of, nb::arg("lowering"), nb::arg("phase"), nb::arg("network").none());
});

}  // namespace apportion::lower
