// Stable orders of integer keys.
#pragma once

#include "owned.hpp"

namespace apportion {

// The stable order of keys in [0, size), in `order`: counting sort.
template <class Keys, class Index>
void counting_order(const Keys& keys, int64_t size, Column<Index> order) {
  const Array<int64_t> place(size + 1);
  for (int64_t i = 0; i < keys.size(); ++i) ++place[keys[i] + 1];
  for (int64_t value = 0; value < size; ++value) place[value + 1] += place[value];
  for (int64_t i = 0; i < keys.size(); ++i) order[place[keys[i]]++] = static_cast<Index>(i);
}

// The stable order of any keys, in `order`: least significant digit first (Knuth, volume 3, section 5.2.5).
void stable_order(Column<const int64_t> keys, Column<int64_t> order);

}  // namespace apportion
