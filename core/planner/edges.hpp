// A row of `Edges` (apportion/planner/tasks/tasks.py).
#pragma once

#include <cstdint>

namespace apportion {

struct Edge {
  std::int32_t tile, home, row, rows, src, dst, parent, lane;
};

}  // namespace apportion
