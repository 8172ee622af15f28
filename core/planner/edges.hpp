// Rows of `Edges` (apportion/planner/tasks/tasks.py), and structs of int32 as the columns of a matrix.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <vector>

#include "numpy.hpp"

namespace apportion {

struct Edge {
  std::int32_t tile, home, row, rows, src, dst, parent, lane;
};

template <class Row>
inline constexpr std::int64_t WIDTH = sizeof(Row) / sizeof(std::int32_t);

// A row as column `at` of a matrix [WIDTH, rows].
template <class Row>
void write_column(const Row& row, std::int64_t at, Matrix<std::int32_t> out) {
  const auto numbers = std::bit_cast<std::array<std::int32_t, WIDTH<Row>>>(row);
  for (std::int64_t column = 0; column < WIDTH<Row>; ++column)
    out[column][at] = numbers[static_cast<std::size_t>(column)];
}

template <class Row>
nb::object columns_of(const std::vector<Row>& rows) {
  New2<std::int32_t> columns(WIDTH<Row>, static_cast<std::int64_t>(rows.size()));
  unlocked([&] {
    std::int64_t at = 0;
    for (const Row& row : rows) write_column(row, at++, columns);
  });
  return columns.array();
}

}  // namespace apportion
