// Input of the walk: the tables of a program of all ranks, sizes of memory, head sets, and tensors by role.
//
// The rule `structure` was checked before (apportion/ir/plan/wellformed.py), and the walk relies on it: codes of ops,
// tensors and spaces are known; an operand that a row names is among the rank's; a head set and a peer exist; counts of
// a rank's instructions add up to the rows of its lists; only dmin and dmax may be negative. Sizes are bounded too:
// judge.py refuses numbers beyond 2^30 - 1, rounds numbered with wide gaps, and tasks of the wrong phase. Everything
// else may be wrong here.
#pragma once

#include "array.hpp"
#include "ir/isa.hpp"
#include "ir/programs.hpp"

namespace apportion::verify {

using Bits = uint64_t;

// Head sets of a plan as bits. With many heads, heads that only occur together share a bit, and several words may be
// needed. Rows: the query and the KV side. bits: a row of each side for every word; number: the number of each set,
// equal for equal sets; size: its number of heads. serves: [sets, sets], true if the second has all KV heads that
// the first's query heads need.
struct HeadSets {
  Matrix<const int64_t> bits, number, size;
  Matrix<const bool> serves;

  static int64_t side(Tensor tensor) { return KV_SIDE.has(tensor); }
  int64_t words() const { return bits.rows() / 2; }
  // The heads of a set in a word; for headless tensors, one bit in the first word.
  Bits bits_of(Tensor tensor, int64_t word, int64_t set) const {
    if (HEADLESS.has(tensor)) return word == 0;
    return static_cast<Bits>(bits[2 * word + side(tensor)][set]);
  }
  int64_t number_of(Tensor tensor, int64_t set) const { return number[side(tensor)][set]; }
  int64_t size_of(Tensor tensor, int64_t set) const { return HEADLESS.has(tensor) ? 0 : size[side(tensor)][set]; }
};

// Columns of the rows of tasks. Forward: `sum` is O; backward: dQ, and the other fields are set.
struct Tasks {
  Ints queries, keys, sum, gradient, statistics, key_sum;
  Ints dmin, dmax, first;
};

struct Rowop {
  int64_t a, b, c, d, first;
};

// Home rows of all ranks, on one axis of addresses (homes.py), and arenas.
struct Memory {
  Column<const int64_t> home_rows, first_address;    // of each rank
  Matrix<const int64_t> arena_rows, arena_heads;     // [ranks, tensors]
};

// inputs: tensors whose home rows hold values at the start; outputs: tensors whose home rows must all be produced;
// foreign: tensors of the other phase.
struct Program : Programs {
  static constexpr std::size_t FIELDS = 8;
  Memory memory;
  HeadSets heads;
  Tensors inputs, outputs, foreign;
  bool is_backward;
  int64_t rounds;  // above every round number
  Table task_list = lists[is_backward ? GRADS : TASKS];
  Tasks tasks = tasks_of(task_list.columns, is_backward);

  static Tasks tasks_of(const IntRows& c, bool backward) {
    return backward ? Tasks{c[0], c[1], c[4], c[2], c[3], c[5], c[6], c[7], c[8]}
                    : Tasks{c[0], c[1], c[2], {}, {}, {}, c[3], c[4], c[5]};
  }
  Rowop rowop(int64_t row) const {
    const IntRows& c = lists[ROWOPS].columns;
    return {c[0][row], c[1][row], c[2][row], c[3][row], c[4][row]};
  }
};

// Tensors whose home rows must end as values.
inline constexpr Tensors FINISHED = Tensors::of(Tensor::O, Tensor::DELTA);

struct Operand {
  Tensor tensor;
  Space space;
  int32_t row, rows, heads;  // heads: a head set

  int64_t end() const { return int64_t{row} + rows; }
  bool is_home() const { return space == Space::HOME; }
};

// Columns: tensor, space, row, rows, head column, heads.
inline constexpr int64_t HEAD_COLUMN = 4;
template <class Columns>
Operand operand_at(const Columns& columns, int64_t x) {
  const auto number = [&](int64_t column) { return static_cast<int32_t>(columns[column][x]); };
  return {static_cast<Tensor>(number(0)), static_cast<Space>(number(1)), number(2), number(3), number(5)};
}

}  // namespace apportion::verify
