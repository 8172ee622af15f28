// Conversions of numbers, and edges.
#pragma once

#include "array.hpp"
#include "owned.hpp"

namespace apportion {

inline int32_t narrow(int64_t number) { return static_cast<int32_t>(number); }

inline double real(int64_t number) { return static_cast<double>(number); }

template <class T>
int64_t count(const std::vector<T>& values) {
  return static_cast<int64_t>(values.size());
}

// The largest of the numbers [low, high) for which `holds` is true; it is for `low`, and not from some number on.
template <class Holds>
int64_t bisect(int64_t low, int64_t high, Holds&& holds) {
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (holds(middle) ? low : high) = middle;
  }
  return low;
}

// A row of `Edges` (apportion/planner/tasks/tasks.py).
struct Edge {
  int32_t tile, home, row, rows, src, dst, parent, lane;
};

}  // namespace apportion
