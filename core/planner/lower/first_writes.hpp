// Which tasks are the first on their rows, and overwrite them; what none of these opens is cleared before.
//
//   task 0          ┌─────────┐                 the first on all of its rows: opens them
//   task 1     ┌────┼────┐    │                 the first on some: these are cleared, it adds
//   task 2     │    │    │    │  ┌────┐         opens
//   rows       ▒▒▒▒▒■■■■■■■■■■■▒▒▒■■■■■■▒▒▒     ▒ cleared
#pragma once

#include <algorithm>

#include "growing.hpp"

namespace apportion::lower {

using std::int32_t;
using std::int64_t;

// Rows that a task adds to: of a `lane`, which stands for one rank's rows or one tile, with some of the heads. may:
// whether they are certain to be as they were at the start but for tasks that come before.
struct Written {
  int32_t task, lane, row, rows;
  bool may;
};

struct Cleared {
  int64_t lane, row, rows;
};

// flags: of each task, 1 if it overwrites. cleared: rows that none of these opens, in longest ranges.
struct Openers {
  Growing<int32_t> flags;
  Growing<Cleared> cleared;
};

// written: by rising task, a task's all apart from each other; held: all rows of each lane.
Openers find_openers(const Growing<Written>& written, const Growing<int64_t>& held, int64_t tasks);

// Rows of a rank that leave it: where ranges begin and end.
class Leaving {
 public:
  void add(int64_t begin, int64_t end);
  void sort();
  // Once all are sorted: whether none of these rows leaves, as no range that begins before their end ends behind their
  // first.
  bool keeps(int64_t begin, int64_t end) const;

 private:
  std::vector<int64_t> low_, high_;
};

}  // namespace apportion::lower
