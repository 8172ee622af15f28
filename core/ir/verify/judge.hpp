// The proof of a program: its ranks are walked in ranges, several in parallel, and each is settled after its walk.
//
//   ranges   0 .. 3  4 .. 9  10 .. 14  15 .. 21  22 ..        of roughly equal numbers of rows
//            └─ batch, a thread each ─┘
//
// A range that depends on ranks not yet walked is walked again at the end, so notes are never kept for all ranks. The
// verdict is the same for any number of threads. Arrays are kept in `Walk`, one per thread.
#pragma once

#include "ir/verify/lists.hpp"
#include "ir/verify/walk.hpp"

namespace apportion::verify {

// ZEROS: something was added to rows that another rank sent as zeros, so ranges cannot be settled one by one.
enum class Verdict : uint8_t { WRONG, RIGHT, ZEROS, TOO_MANY };

// walked_again: number of ranges that were walked a second time.
struct Judgement {
  Verdict verdict;
  int64_t walked_again;

  auto fields() const { return std::tuple(verdict, walked_again); }
};

struct Limits {
  int64_t threads;
  int64_t rows;    // operands, tasks and rowops of a range
  int64_t pieces;  // of the attention of tasks
};

// Proves a program; the attention of its tasks is then in `lists`.
Judgement judge(const Program& program, Lists& lists, bool together, const Limits& limits);

// faults: at most one per rank. parts: the bands of all tasks with known rows, each with its task and head set.
// is_complete: true if these are all tasks.
struct Trace {
  Trace() = default;  // not an aggregate, which would be an argument from a tuple
  std::vector<Fault> faults;
  Growing<Piece> parts;
  bool is_complete = false;
};

// Walks each rank by itself. Returns the faults and the attention of the tasks; nothing if that has over `max_pieces`
// pieces.
std::optional<Trace> trace(const Program& program, int64_t max_pieces);

}  // namespace apportion::verify
