// Splits home rows into parts by the instruction that uses or writes them, and finds runs of equal parts.
#include <algorithm>

#include "bind.hpp"

namespace apportion {

using std::int64_t;

struct Runs {
  std::vector<int64_t> of, first, behind;
};

static Runs runs(Column<const int64_t> value, Column<const int64_t> wanted, Column<const int64_t> low,
                 Column<const int64_t> high) {
  Runs found;
  for (int64_t one = 0; one < low.size(); ++one) {
    for (int64_t part = low[one]; part < high[one]; ++part) {
      const int64_t begin = part;
      while (part < high[one] && value[part] == wanted[one]) ++part;
      if (begin == part) continue;
      found.of.push_back(one);
      found.first.push_back(begin);
      found.behind.push_back(part);
    }
  }
  return found;
}

void bind_fusion(nb::module_& m) {
  m.def("all_alike", [](In<int64_t, "ptr"> ptr, IntsIn<"tensor"> tensor, IntsIn<"space"> space, IntsIn<"col"> col,
                        IntsIn<"heads"> heads, In<bool, "looked_at"> looked_at, int64_t work) {
    New<bool> alike(ptr.size() - 1);
    unlocked([&] {
      std::vector<int64_t> storage(static_cast<std::size_t>(looked_at.size()));
      const Column<int64_t> first(storage.data(), looked_at.size());
      for (int64_t rank = 0; rank < alike.size(); ++rank) {
        std::fill(first.begin(), first.end(), -1);
        alike[rank] = true;
        for (int64_t i = ptr[rank]; i < ptr[rank + 1]; ++i) {
          if (space[i] != work || !looked_at[tensor[i]]) continue;
          int64_t& one = first[tensor[i]];
          if (one < 0) one = i;
          alike[rank] = alike[rank] && col[i] == col[one] && heads[i] == heads[one];
        }
      }
    });
    return alike.array();
  });

  m.def("latest", [](Out<int64_t, "last"> last, Out<int64_t, "times"> times, In<int64_t, "used"> used,
                     In<int64_t, "at"> at, In<int64_t, "low"> low, In<int64_t, "high"> high) {
    unlocked([&] {
      for (int64_t use = 0; use < used.size(); ++use) {
        const int64_t operand = used[use];
        if (operand < 0) continue;
        for (int64_t part = low[operand]; part < high[operand]; ++part) {
          last[part] = std::max(last[part], at[use]);
          ++times[part];
        }
      }
    });
  });

  m.def("put", [](Out<int64_t, "values"> values, In<int64_t, "low"> low, In<int64_t, "high"> high,
                  In<int64_t, "given"> given) {
    unlocked([&] {
      for (int64_t one = 0; one < low.size(); ++one) {
        const Column<int64_t> some = values.slice(low[one], std::max(low[one], high[one]));
        std::fill(some.begin(), some.end(), given[one]);
      }
    });
  });

  m.def("runs", [](In<int64_t, "value"> value, In<int64_t, "wanted"> wanted, In<int64_t, "low"> low,
                   In<int64_t, "high"> high) {
    Runs found = unlocked([&] { return runs(value, wanted, low, high); });
    return nb::make_tuple(handed(std::move(found.of)), handed(std::move(found.first)),
                          handed(std::move(found.behind)));
  });
}

}  // namespace apportion
