// Sums of integers by index.
#include <algorithm>

#include "bind.hpp"

namespace apportion {

using std::int64_t;

void bind_sums(nb::module_& m) {
  m.def("exact_sums", [](IntsIn<"index"> index, IntsIn<"values"> values, int64_t size) {
    New<int64_t> sums(size);
    unlocked([&] {
      std::fill(sums.begin(), sums.end(), 0);
      for (int64_t place = 0; place < index.size(); ++place) sums[index[place]] += values[place];
    });
    return sums.array();
  });
}

}  // namespace apportion
