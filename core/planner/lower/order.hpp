// The order of a program's steps: when rounds start, when they are waited for, and what is computed in between.
//
//   forward    start, ..                | local tasks | wait, start ready   | tasks of that round | start | ..
//   backward   the same; after each stage also start the returns whose rows are complete, wait for returns of earlier
//              stages, and add them. Forward does this for results if queries leave home
//
// Rows that only the tasks of one tile compute go home as results, in separate rounds, and nothing is added to them.
//
// A round may start once the rounds that bring its relays have arrived and the buffers allow it. All ranks share the
// order, so rounds ascend on every rank.
#pragma once

#include <functional>

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

}  // namespace apportion::lower
