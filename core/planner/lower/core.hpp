// The attention of groups of ranks between exchanges: tiles go to the ranks of tasks, and sums return.
//
//   forward    F0.. start | local tasks | wait F0, its tasks, start F3 | wait F1, ..
//   backward   F0.. start | local | wait F0, its tasks, start R0, F3, wait R-1, add | ..
//
// F: rounds that fetch tiles: KV rows and, if queries travel, Q rows (in backward also dO and delta). R: rounds that
// return the sums of remote rows, the reverse of F (in a ring: onward with the tile): gradients and, if queries travel,
// the partial or complete results of forward. The transfers of a round overlap the tasks of earlier rounds.
#pragma once

#include "planner/lower/order.hpp"

namespace apportion::lower {

// The tensor that tasks accumulate for queries.
inline Tensor sums_of_queries(bool backward) { return backward ? Tensor::DQ : Tensor::O; }

// Appends the steps and rows of all groups.
void lower_core(Program& program, const Lowering& low, bool backward, const Callbacks& between = {});

// Clears attention rows that no task initializes.
void clear_unopened(Program& program, int64_t step, const Sides& sides, Space space, bool backward);

// fetched, summed: the first work rows of the tiles of one side, and of their sums.
struct Places {
  Growing<int64_t> fetched, summed;
};
// Appends each task at its step.
void attend(Program& program, const Lowering& low, const Sides& sides, const Growing<int64_t>& steps, Space space,
            bool backward, const Places& queries = {}, const Places& keys = {});

}  // namespace apportion::lower
