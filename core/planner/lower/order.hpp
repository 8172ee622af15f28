// The order of a program's steps: when rounds start, when they are waited for, and what is computed in between.
//
//   forward    start, ..                | local tasks | wait, start ready   | tasks of that round | start | ..
//   backward   the same, and after each stage: start the returns whose rows are complete, wait for those of earlier
//              stages and add them; so does a forward whose queries leave home, for their results
//
// Rows computed only by the tasks of one tile go home as results, in separate rounds, and nothing is added to them.
//
// A round may start when the rounds that bring its relays have arrived and the buffers allow it. All ranks share the
// order, so launches ascend on every rank.
#pragma once

#include <functional>

#include "planner/lower/sides.hpp"

namespace apportion::lower {

// Sums of tiles return in batches: tiles of one batch arrived in one round, are complete after the stage of one round,
// and return as `results` or are added. add: for results the step of the wait.
struct Batch {
  int64_t round, complete, channel;
  bool results;
  int64_t launch = -1, wait = -1, add = -1;
};

// Steps that fetch tiles, compute with them, and return their sums. launch, wait: of rounds; stage: of
// stages; clear: of rounds, before the stage that first writes the sums of their tiles. batch: of edges, -1 if they
// return nothing.
struct Order {
  Growing<int64_t> launch, wait, stage, clear;
  Growing<Batch> batches;
  Growing<int32_t> batch;
};

// Called after the first stage, and before the last.
struct Between {
  std::function<void()> first = [] {}, last = [] {};
};

// Appends the steps between exchanges.
Order append_steps(Program& program, const Lowering& low, const Sides& sides, bool backward, const Between& between);

}  // namespace apportion::lower
