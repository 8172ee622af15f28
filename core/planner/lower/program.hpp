// The result of lowering: one template of steps for all ranks, and the rows of lists, each with a rank and a step.
//
// Rows of one rank and step keep the order in which they were added. They contain operands by value; operands get
// numbers when tables are written.
#pragma once

#include "owned.hpp"
#include "ir/isa.hpp"
#include "planner/numbers.hpp"

namespace apportion::lower {

// Thrown if the work rows of a rank, or the steps of all ranks, exceed the number range of tables.
struct TooLarge {
  int64_t rows = 0, steps = 0;
};
inline constexpr int64_t LIMIT = int64_t{1} << 31;

// Rows of a tensor with some of its heads; no rows: no operand. It is packed into 12 bytes, since there are many.
class Operand {
 public:
  Operand() = default;
  Operand(Tensor tensor, Space space, int64_t row, int64_t rows, int64_t heads)
      : row_(narrow(row)),
        rows_(narrow(rows)),
        kind_(narrow(heads << 5) | static_cast<int32_t>(tensor) << 1 | static_cast<int32_t>(space)) {}

  bool none() const { return rows_ == 0; }
  int32_t row() const { return row_; }
  int32_t rows() const { return rows_; }
  int32_t heads() const { return kind_ >> 5; }
  Tensor tensor() const { return static_cast<Tensor>(kind_ >> 1 & 15); }
  Space space() const { return static_cast<Space>(kind_ & 1); }
  bool same_rows(const Operand& other) const {
    return row_ == other.row_ && rows_ == other.rows_ && ((kind_ ^ other.kind_) & ~30) == 0;
  }
  Operand of(Tensor other) const { return {other, space(), row_, rows_, heads()}; }
  Operand with(int64_t heads) const { return {tensor(), space(), row_, rows_, heads}; }
  // The end of work rows; 0 for home rows.
  int64_t reach() const { return space() == Space::WORK ? int64_t{row_} + rows_ : 0; }

 private:
  int32_t row_ = 0, rows_ = 0, kind_ = 0;
};

// Throws TooLarge.
inline Operand rows_of(Tensor tensor, Space space, int64_t row, int64_t rows, int64_t heads = 0) {
  if (space == Space::WORK && row + rows >= LIMIT) throw TooLarge{row + rows, 0};
  return {tensor, space, row, rows, heads};
}

struct Transfer {
  int32_t rank, step, send, peer;
  Operand operand;
};

// A row of `tasks` or of `grads`. The other tensors of queries have the same rows as `queries`.
struct Attention {
  int32_t rank, step, dmin, dmax, first;
  Operand queries, keys, query_sums, key_sums;
};

struct RowOp {
  int32_t rank, step;
  Operand a, b, c, d;
  int32_t first = 0;
};

// launch: for a wait, the step of its launch; else -1.
struct Step {
  Op op;
  int64_t round = 0, channel = 0, mode = 0, launch = -1;
};

struct Program {
  Growing<Step> steps;
  int64_t rounds = 0;
  Growing<Transfer> transfers;
  Growing<Attention> attention;
  Growing<RowOp> rowops;

  // Append a step and return its position.
  int64_t step(Op op) { return put({op}); }
  int64_t launch(int64_t channel, int64_t mode = 0) { return put({Op::LAUNCH, rounds++, channel, mode}); }
  int64_t wait(int64_t launch) { return put({Op::WAIT, steps[launch].round, 0, 0, launch}); }
  // Appends the steps of another program, in new rounds and without its rows; returns the position of the first step.
  int64_t append(const Program& other) {
    const int64_t first = steps.count();
    for (Step copy : other.steps) {
      if (copy.op == Op::LAUNCH || copy.op == Op::WAIT) copy.round += rounds;
      if (copy.launch >= 0) copy.launch += first;
      steps.push_back(copy);
    }
    rounds += other.rounds;
    return first;
  }

  void send(int64_t step, int64_t src, int64_t dst, const Operand& operand) {
    transfers.push_back({narrow(src), narrow(step), 1, narrow(dst), operand});
  }
  void receive(int64_t step, int64_t src, int64_t dst, const Operand& operand) {
    transfers.push_back({narrow(dst), narrow(step), 0, narrow(src), operand});
  }
  void clear(int64_t step, int64_t rank, const Operand& c) {
    rowops.push_back({narrow(rank), narrow(step), {}, {}, c, {}});
  }
  // Appends a row of merge or add or, with `first` set, of copy or deliver.
  void combine(int64_t step, int64_t rank, const Operand& a, const Operand& c, int32_t first = 0) {
    rowops.push_back({narrow(rank), narrow(step), a, {}, c, {}, first});
  }

 private:
  int64_t put(const Step& step) {
    steps.push_back(step);
    return steps.count() - 1;
  }
};

// Calls visit(rank, operand) for every operand in rows, mutable if the program is.
template <class Rows, class Visit>
void each_operand(Rows& program, Visit&& visit) {
  for (auto& row : program.transfers) visit(row.rank, row.operand);
  for (auto& row : program.attention)
    for (auto* operand : {&row.queries, &row.keys, &row.query_sums, &row.key_sums}) visit(row.rank, *operand);
  for (auto& row : program.rowops)
    for (auto* operand : {&row.a, &row.b, &row.c, &row.d}) visit(row.rank, *operand);
}

}  // namespace apportion::lower
