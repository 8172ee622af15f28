// Programs of one or more ranks: the tables of apportion/ir/isa.py, rank after rank, and walks over their instructions.
#pragma once

#include "ir/isa.hpp"
#include "owned.hpp"

namespace apportion {

enum List { TRANSFERS, TASKS, GRADS, ROWOPS, NO_LIST };

// The list whose rows an op consumes.
inline List list_of(Op op) {
  switch (op) {
    case Op::LAUNCH:
      return TRANSFERS;
    case Op::WAIT:
      return NO_LIST;
    case Op::ATTEND:
      return TASKS;
    case Op::ATTEND_GRAD:
      return GRADS;
    default:
      return ROWOPS;
  }
}

// An instruction of a rank, numbered over all ranks, and the rows [first, end) of its list.
struct Step {
  int64_t rank, index;
  Op op;
  List list;
  int64_t first, end;
};

struct Programs {
  using Given = std::vector<Table>;  // of isa.TABLES, in their order
  explicit Programs(const Given& tables) {
    int64_t next = 0;
    for (Table* table : {&arenas, &operands, &instructions, &lists[TRANSFERS], &lists[TASKS], &lists[GRADS], &lists[ROWOPS]})
      *table = tables.at(static_cast<std::size_t>(next++));
    const auto name = [](const Table& rows, std::initializer_list<Ints*> columns) {
      int64_t i = 0;
      for (Ints* column : columns) *column = rows.columns[i++];
    };
    name(operands, {&tensor, &space, &row, &rows, &col, &heads});
    name(instructions, {&op, &round, &channel, &mode, &count});
    name(lists[TRANSFERS], {&send, &peer, &operand});
  }

  Table arenas, operands, instructions;
  Table lists[NO_LIST];
  // columns of operands, of instructions, and of transfers
  Ints tensor, space, row, rows, col, heads;
  Ints op, round, channel, mode, count;
  Ints send, peer, operand;

  int64_t ranks() const { return instructions.ranks(); }
  Tensor tensor_of(int64_t operand_at) const { return static_cast<Tensor>(tensor[operand_at]); }
  bool is_home(int64_t operand_at) const { return space[operand_at] == static_cast<int64_t>(Space::HOME); }
  bool is_whole(int64_t operand_at) const { return heads[operand_at] == 0; }

  // Calls visit(step) for each instruction of all ranks, or of one.
  template <class Visit>
  void each_step(Visit&& visit) const {
    for (int64_t rank = 0; rank < ranks(); ++rank) each_step(rank, visit);
  }
  template <class Visit>
  void each_step(int64_t rank, Visit&& visit) const {
    int64_t next[NO_LIST + 1] = {};
    for (int list = 0; list < NO_LIST; ++list) next[list] = lists[list].ptr[rank];
    for (int64_t at = instructions.ptr[rank]; at < instructions.ptr[rank + 1]; ++at) {
      const auto code = static_cast<Op>(op[at]);
      const List list = list_of(code);
      const int64_t first = next[list];
      if (list != NO_LIST) next[list] += count[at];
      visit(Step{rank, at, code, list, first, next[list]});
    }
  }
};

// Columns of each list that name operands: [first, end).
inline constexpr struct {
  int64_t first, end;
} OPERAND_COLUMNS[NO_LIST] = {{2, 3}, {0, 3}, {0, 6}, {0, 4}};

// Head counts of operands. sizes: [2, 1 + head sets], on the query and the KV side, for all heads and each set.
struct HeadCounts {
  using Given = Matrix<const int64_t>;
  explicit HeadCounts(const Given& counts) : sizes(counts) {}
  Given sizes;

  int64_t of(Tensor tensor, int64_t set) const {
    return HEADLESS.has(tensor) ? 1 : sizes[KV_SIDE.has(tensor)][set];
  }
};

// Pairs the k-th send i -> j of each round with the k-th receive of j from i. tile: a number per operand, or empty.
// mate: the matching transfer of each, or -1; agreed: true if their operands have equal tiles.
std::pair<Array<int64_t>, Array<bool>> match(const Programs& programs, Column<const int64_t> tile);

}  // namespace apportion
