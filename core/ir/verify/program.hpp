// Input of the walk: the tables of a program of all ranks, sizes of memory, head sets, and tensors by role.
//
// The rule `structure` was checked before (apportion/ir/plan/wellformed.py), and the walk relies on it: codes of ops,
// tensors and spaces are known; an operand that a row names is among the rank's; a head set and a peer exist; counts of
// a rank's instructions add up to the rows of its lists; only dmin and dmax may be negative. Sizes are bounded too:
// judge.py refuses numbers beyond 2^30 - 1, rounds numbered with wide gaps, and tasks of another phase. Everything else
// may be wrong here.
#pragma once

#include "array.hpp"
#include "ir/verify/heads.hpp"

namespace apportion::verify {

using Offsets = Column<const int64_t>;  // where each rank's rows begin, and the end

// Columns: tensor, space, row, rows, head column, heads.
inline constexpr int64_t HEAD_COLUMN = 4;
struct Operands {
  IntRows columns;
  Offsets of_rank;
};

struct Instructions {
  Ints op, round, channel, mode, count;
  Offsets of_rank;
};

struct Transfers {
  Ints send, peer, operand;
  Offsets of_rank;
};

// Forward: `sum` is O; backward: dQ, and the other fields are set.
struct Tasks {
  Ints queries, keys, sum, gradient, statistics, key_sum;
  Ints dmin, dmax, first;
  Offsets of_rank;
};

struct Rowops {
  Ints a, b, c, d, first;
  Offsets of_rank;
};

// Home rows of all ranks, on one axis of addresses (homes.py), and arenas.
struct Memory {
  Column<const int64_t> home_rows, first_address;    // of each rank
  Matrix<const int64_t> arena_rows, arena_heads;     // [ranks, tensors]
};

// given: tensors whose home rows hold values at the start; owed: tensors whose home rows must all be produced; foreign:
// of another phase.
struct Program {
  Operands operands;
  Instructions instructions;
  Transfers transfers;
  Tasks tasks;
  Rowops rowops;
  Memory memory;
  HeadSets heads;
  Tensors given{0}, owed{0}, foreign{0};
  bool is_backward = false;
  int64_t rounds = 0;  // they are numbered below

  int64_t ranks() const { return memory.home_rows.size(); }
};

// Tensors of which home rows must end as values.
inline constexpr Tensors FINISHED = Tensors::of(Tensor::O, Tensor::DELTA);

struct Operand {
  Tensor tensor;
  Space space;
  std::int32_t row, rows, heads;  // heads: a head set

  int64_t end() const { return int64_t{row} + rows; }
  bool is_home() const { return space == Space::HOME; }
};

template <class Columns>
Operand operand_at(const Columns& columns, int64_t x) {
  const auto number = [&](int64_t column) { return static_cast<std::int32_t>(columns[column][x]); };
  return {static_cast<Tensor>(number(0)), static_cast<Space>(number(1)), number(2), number(3), number(5)};
}

}  // namespace apportion::verify
