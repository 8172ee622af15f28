// Initialization of accumulators: tasks that are first on all their rows overwrite them; other rows are cleared before.
//
//   task 0          ┌─────────┐                 first on all of its rows: opens (initializes) them
//   task 1     ┌────┼────┐    │                 first on some of its rows: these are cleared, the task adds
//   task 2     │    │    │    │  ┌────┐         opens its rows
//   rows       ▒▒▒▒▒■■■■■■■■■■■▒▒▒■■■■■■▒▒▒     ▒ cleared
#pragma once

#include <algorithm>

#include "owned.hpp"

namespace apportion::lower {

using std::int32_t;
using std::int64_t;

// Rows to which a task adds, in a lane: one rank's rows or one tile, with some of the heads. may_open: whether only
// earlier tasks can have changed their initial state, so that this task may open them.
struct WrittenRows {
  int32_t task, lane, row, rows;
  bool may_open;
};

struct ClearedRows {
  int64_t lane, row, rows;
};

// flags: 1 for tasks that overwrite. cleared: the rows that no such task initializes, in maximal ranges.
struct Openers {
  Growing<int32_t> flags;
  Growing<ClearedRows> cleared;
};

// written: in task order, with disjoint ranges per task; held: the number of rows of each lane.
Openers find_openers(const Growing<WrittenRows>& written, const Growing<int64_t>& held, int64_t tasks);

// The rows of a rank that leave it, as the begins and ends of ranges.
class LeavingRows {
 public:
  void add(int64_t begin, int64_t end);
  void sort();
  // True, after sorting, if none of these rows leaves: every range that begins before their end also ends before them.
  bool keeps(int64_t begin, int64_t end) const;

 private:
  std::vector<int64_t> low_, high_;
};

}  // namespace apportion::lower
