// Attention of groups of ranks between exchanges: tiles are sent to the ranks of tasks, and sums are returned.
//
//   forward    F0.. start | local tasks | wait F0, its tasks, start F3 | wait F1, ..
//   backward   F0.. start | local | wait F0, its tasks, start R0, F3, wait R-1, add | ..
//
// F: rounds that fetch tiles: KV rows, and where queries travel Q (backward also dO and delta) rows. R: rounds that
// return sums for remote rows, the reverse of F (in a ring: onward with the tile): gradients, and, if queries travel,
// the results of the forward, partial or complete. The transfers of a round overlap the tasks of earlier rounds.
#pragma once

#include "planner/lower/order.hpp"

namespace apportion::lower {

// The tensor that tasks accumulate for queries.
inline Tensor sums_of_queries(bool backward) { return backward ? Tensor::DQ : Tensor::O; }

// Appends steps and rows of all groups.
void lower_core(Program& program, const Lowering& low, bool backward, const Between& between = {});

// Clears attention rows that no task initializes.
void clear_unopened(Program& program, int64_t step, const Sides& sides, Space space, bool backward);

// Appends each task at its step. fetched, summed: first work rows of the tiles of either side, and of their sums.
struct Places {
  Growing<int64_t> fetched, summed;
};
void attend(Program& program, const Lowering& low, const Sides& sides, const Growing<int64_t>& steps, Space space,
            bool backward, const Places& queries = {}, const Places& keys = {});

}  // namespace apportion::lower
