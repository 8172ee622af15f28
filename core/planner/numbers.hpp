// Conversions of numbers.
#pragma once

#include "owned.hpp"

namespace apportion {

inline std::int32_t narrow(std::int64_t number) { return static_cast<std::int32_t>(number); }

inline double real(std::int64_t number) { return static_cast<double>(number); }

template <class T>
std::int64_t count(const std::vector<T>& values) {
  return static_cast<std::int64_t>(values.size());
}

}  // namespace apportion
