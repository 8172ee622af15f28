// The proof of a program: its ranks walked in ranges, several at a time, and each settled when it has been walked.
//
//   ranges   0 .. 3  4 .. 9  10 .. 14  15 .. 21  22 ..        of much the same number of rows
//            └─ batch, a thread each ─┘
//
// A range that hangs on ranks that were not walked is walked again when all were: what is noted of ranks is never kept of
// all of them. The verdict is the same for any number of threads. What a rank leaves room for is in `Walk`, one a thread.
#pragma once

#include "ir/verify/lists.hpp"
#include "ir/verify/walk.hpp"

namespace apportion::verify {

// ZEROS: something was added to rows that another rank sent as zeros, so ranges cannot be settled one by one.
enum class Verdict : std::uint8_t { WRONG, RIGHT, ZEROS, TOO_MANY };

// hanging: ranges that were walked a second time.
struct Judged {
  Verdict verdict;
  int64_t hanging;
};

struct Limits {
  int64_t threads;
  int64_t rows;    // operands, tasks and rowops of a range
  int64_t pieces;  // of what tasks attend to
};

// Whether all is right with a program: then what its tasks attend to is in `lists`.
Judged judge(const Program& program, Lists& lists, bool together, const Limits& limits);

// Of each rank at most one fault; bands of all tasks whose rows are known, with task and head set; whether these are all.
struct Trace {
  std::vector<Fault> faults;
  std::vector<Piece> parts;
  bool is_complete = false;
};

// Each rank walked by itself, where it stopped, and what tasks attend to.
Trace trace(const Program& program, int64_t most_pieces);

}  // namespace apportion::verify
