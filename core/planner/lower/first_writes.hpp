// Initialization of accumulators: tasks that are the first on their rows overwrite them; other rows are cleared before.
//
//   task 0          ┌─────────┐                 the first on all of its rows: initializes them
//   task 1     ┌────┼────┐    │                 the first on some: these are cleared, it adds
//   task 2     │    │    │    │  ┌────┐         opens
//   rows       ▒▒▒▒▒■■■■■■■■■■■▒▒▒■■■■■■▒▒▒     ▒ cleared
#pragma once

#include <algorithm>

#include "owned.hpp"

namespace apportion::lower {

using std::int32_t;
using std::int64_t;

// Rows that a task adds to: of a `lane`, which is one rank's rows or one tile, with some of the heads. may: true if
// they are certain to be in their initial state except for earlier tasks.
struct Written {
  int32_t task, lane, row, rows;
  bool may;
};

struct Cleared {
  int64_t lane, row, rows;
};

// flags: of each task, 1 if it overwrites. cleared: rows that none of these initializes, in maximal ranges.
struct Openers {
  Growing<int32_t> flags;
  Growing<Cleared> cleared;
};

// written: by ascending task, a task's ranges disjoint; held: all rows of each lane.
Openers find_openers(const Growing<Written>& written, const Growing<int64_t>& held, int64_t tasks);

// Rows of a rank that leave it: ends of ranges.
class Leaving {
 public:
  void add(int64_t begin, int64_t end);
  void sort();
  // After sorting: true if none of these rows leaves, as no range that begins before their end ends after their first.
  bool keeps(int64_t begin, int64_t end) const;

 private:
  std::vector<int64_t> low_, high_;
};

}  // namespace apportion::lower
