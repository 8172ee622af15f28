// Numbers the rounds of edges, parents before children: apportion/planner/schedule.
#include <algorithm>

#include "bind.hpp"

namespace apportion {

using std::int32_t;
using std::int64_t;

namespace {

// Keys of rounds with an edge, ascending; stores the round numbers of edges in `round`. first: the times of edges that
// leave home, one after another; a relay's is `lag` after its parent's. A key is time * levels + levels - 1 - depth.
std::vector<int64_t> number_rounds(Ints parent, Column<const int64_t> depth, Ints first, int64_t levels, int64_t lag,
                                   Column<int32_t> round) {
  std::vector<int64_t> times, keys;
  int64_t roots = 0, most = 0;
  for (int64_t edge = 0; edge < parent.size(); ++edge) {
    const int64_t before = parent[edge];
    times.push_back(before < 0 ? first[roots++] : times[static_cast<std::size_t>(before)] + lag);
    keys.push_back(times.back() * levels + levels - 1 - depth[edge]);
    most = std::max(most, keys.back() + 1);
  }
  std::vector<int32_t> number(static_cast<std::size_t>(most), -1);
  for (const int64_t key : keys) number[static_cast<std::size_t>(key)] = 0;
  std::vector<int64_t> found;
  for (int64_t key = 0; key < most; ++key) {
    if (number[static_cast<std::size_t>(key)] < 0) continue;
    number[static_cast<std::size_t>(key)] = static_cast<int32_t>(found.size());
    found.push_back(key);
  }
  for (int64_t edge = 0; edge < parent.size(); ++edge)
    round[edge] = number[static_cast<std::size_t>(keys[static_cast<std::size_t>(edge)])];
  return found;
}

}  // namespace

void bind_rounds(nb::module_& m) {
  m.def("number_rounds", [](IntsIn<"parent"> parent, In<int64_t, "depth"> depth, IntsIn<"first"> first, int64_t levels,
                            int64_t lag) {
    New<int32_t> round(parent.size());
    std::vector<int64_t> keys = unlocked([&] { return number_rounds(parent, depth, first, levels, lag, round); });
    return nb::make_tuple(handed(std::move(keys)), round.array());
  });

  // The largest number of edges in each round that one rank sends or receives.
  m.def("degrees", [](IntsIn<"src"> src, IntsIn<"dst"> dst, IntsIn<"round"> round, int64_t rounds, int64_t ranks) {
    New<int64_t> most(rounds);
    unlocked([&] {
      std::fill(most.begin(), most.end(), 0);
      std::vector<int64_t> sent(static_cast<std::size_t>(rounds * ranks)), received(sent);
      for (int64_t edge = 0; edge < src.size(); ++edge) {
        const int64_t one = round[edge];
        most[one] = std::max({most[one], ++sent[static_cast<std::size_t>(one * ranks + src[edge])],
                              ++received[static_cast<std::size_t>(one * ranks + dst[edge])]});
      }
    });
    return most.array();
  });

  // The part, from 1 on, in which each edge begins, of `parts` equal parts of the rows that its ranks exchange; a relay
  // is in its parent's.
  m.def("even_parts", [](IntsIn<"parent"> parent, IntsIn<"src"> src, IntsIn<"dst"> dst, IntsIn<"rows"> rows,
                         int64_t ranks, int64_t parts) {
    New<int64_t> part(src.size());
    unlocked([&] {
      std::vector<int64_t> total(static_cast<std::size_t>(ranks * ranks)), before(total);
      const auto pair = [&](int64_t edge) { return static_cast<std::size_t>(src[edge] * ranks + dst[edge]); };
      for (int64_t edge = 0; edge < src.size(); ++edge)
        if (parent[edge] < 0) total[pair(edge)] += rows[edge];
      for (int64_t edge = 0; edge < src.size(); ++edge) {
        part[edge] = parent[edge] < 0 ? 1 + before[pair(edge)] * parts / total[pair(edge)] : part[parent[edge]];
        if (parent[edge] < 0) before[pair(edge)] += rows[edge];
      }
    });
    return part.array();
  });
}

}  // namespace apportion
