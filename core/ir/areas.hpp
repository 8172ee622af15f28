// Area (query-key pairs) of a band; the formula is that of `bands.area` in apportion/ir/masks/bands.py.
#pragma once

#include "array.hpp"

namespace apportion {

inline int64_t triangle(int64_t side) {
  side = std::max<int64_t>(side, 0);
  return (side + 1) / 2 * (side | 1);  // halved first: side may be 2**32 - 2
}

// Pairs (a, b) in [0, q) x [0, k) with a + b < m.
inline int64_t pairs_below(int64_t q, int64_t k, int64_t m) {
  m = std::min(std::max<int64_t>(m, 0), q + k);
  return triangle(m) - triangle(m - q) - triangle(m - k);
}

// Pairs of a band; 0 if it is empty.
inline int64_t area_of(int64_t q0, int64_t q1, int64_t k0, int64_t k1, int64_t dmin, int64_t dmax) {
  const int64_t q = std::max<int64_t>(q1 - q0, 0), k = std::max<int64_t>(k1 - k0, 0);
  const int64_t offset = k1 - q0;
  const int64_t pairs = pairs_below(q, k, dmax + offset) - pairs_below(q, k, dmin - 1 + offset);
  return std::max<int64_t>(pairs, 0);
}

}  // namespace apportion
