// Sums and maxima of integers by index.
#include <algorithm>

#include "bind.hpp"

namespace apportion {

using std::int32_t;
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

  // index -1 is the last
  m.def("raise_to", [](Out<int32_t, "most"> most, IntsIn<"index"> index, In<int32_t, "values"> values) {
    unlocked([&] {
      for (int64_t place = 0; place < index.size(); ++place) {
        int32_t& one = most[index[place] < 0 ? index[place] + most.size() : index[place]];
        one = std::max(one, values[place]);
      }
    });
  });
}

}  // namespace apportion
