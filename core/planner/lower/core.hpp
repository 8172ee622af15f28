// The attention of groups of ranks between exchanges: tiles go to the ranks of tasks, and sums return.
//
//   forward    F0.. start | local tasks | wait F0, its tasks, start F3 | wait F1, ..
//   backward   F0.. start | local | wait F0, its tasks, start R0, F3, wait R-1, add | ..
//
// F: rounds that fetch tiles: KV rows and, if queries travel, Q rows (in backward also dO and delta). R: rounds that
// return the sums of remote rows, the reverse of F (in a ring: onward with the tile): gradients and, if queries travel,
// the partial or complete results of forward. The transfers of a round overlap the tasks of earlier rounds.
#pragma once

#include "planner/lower/sides.hpp"

namespace apportion::lower {

// Sums of tiles return in batches: all tiles of a batch arrived in round `round`, are complete after the stage of round
// `complete`, and either return as `results` or are added. add: the step that adds; for results, the step of the wait.
struct Batch {
  int64_t round, complete, channel;
  bool results;
  int64_t launch = -1, wait = -1, add = -1;
};

// The steps that fetch tiles, compute with them, and return their sums. launch, wait: by round; stage: by stage; clear:
// by round, before the stage that first writes the sums of its tiles. batch: by edge; -1 if it returns nothing.
struct Order {
  Growing<int64_t> launch, wait, stage, clear;
  Growing<Batch> batches;
  Growing<int32_t> batch;
};

// Callbacks after the first stage and before the last.
struct Callbacks {
  std::function<void()> first = [] {}, last = [] {};
};

// Appends the steps between exchanges.
Order append_steps(Program& program, const Lowering& low, const Sides& sides, bool backward, const Callbacks& between);

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
