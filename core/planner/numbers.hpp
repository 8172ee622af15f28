// Conversions of numbers and of vectors of rows into columns.
#pragma once

#include <functional>

#include "numpy.hpp"

namespace apportion {

inline std::int32_t narrow(std::int64_t number) { return static_cast<std::int32_t>(number); }

inline double real(std::int64_t number) { return static_cast<double>(number); }

template <class T>
std::int64_t count(const std::vector<T>& some) {
  return static_cast<std::int64_t>(some.size());
}

// int64 [members, rows]: members of rows, or what is made of each.
template <class Row, class... Members>
nb::object as_columns(const std::vector<Row>& rows, Members... members) {
  New2<std::int64_t> found(sizeof...(members), count(rows));
  std::int64_t at = 0;
  const auto fill = [&](Column<std::int64_t> column, auto member) {
    for (std::int64_t i = 0; i < count(rows); ++i) column[i] = std::invoke(member, rows[static_cast<std::size_t>(i)]);
  };
  (fill(found[at++], members), ...);
  return found.array();
}

}  // namespace apportion
