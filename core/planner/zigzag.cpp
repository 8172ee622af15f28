// Zig-zag chunks: chunks i and 2N-1-i of a range on the i-th of its N ranks. See apportion/planner/place/zigzag.py.
#include <algorithm>
#include <numeric>
#include <vector>

#include "bind.hpp"
#include "planner/scratch.hpp"

namespace apportion {

using std::int64_t;

namespace {

// First of the `size` consecutive ranks that hold the fewest tokens, range after range, the longest first.
void find_emptiest(Column<const int64_t> lengths, Column<const int64_t> size, int64_t ranks, Column<int64_t> first) {
  std::vector<int64_t> order(static_cast<std::size_t>(lengths.size()));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t one, int64_t other) { return lengths[one] > lengths[other]; });
  const Scratch<int64_t> used(ranks);
  for (const int64_t index : order) {
    const int64_t width = size[index];
    int64_t held = std::accumulate(used.begin(), used.begin() + width, int64_t{0}), best = 0, least = held;
    for (int64_t begin = 1; begin + width <= ranks; ++begin) {
      held += used[begin + width - 1] - used[begin - 1];
      if (held < least) {
        best = begin;
        least = held;
      }
    }
    first[index] = best;
    for (int64_t rank = best; rank < best + width; ++rank) used[rank] += lengths[index] / width;
  }
}

struct Blocks {
  std::vector<int64_t> starts, home;
};

// Blocks of ranges that are cut zig-zag, each for its own group: `deal` of zigzag.py.
Blocks deal(Column<const int64_t> ranges, Column<const int64_t> first, Column<const int64_t> size) {
  Blocks made;
  for (int64_t index = 0; index < first.size(); ++index) {
    int64_t at = ranges[index];
    const int64_t ranks = size[index], length = ranges[index + 1] - at, lap = at / ranks, turn = at % ranks;
    const std::size_t opening = made.home.size();
    const int64_t share = length / (2 * ranks), extra = length - 2 * ranks * share;
    // ranks that hold any token: all, or `extra` from `turn` on, wrapped to [0, wrapped) and [turn, ...)
    const int64_t holders = share ? ranks : std::min(extra, ranks),
                  wrapped = std::max<int64_t>(0, turn + holders - ranks);
    for (int64_t step = 0; step < 2 * holders; ++step) {
      const bool tail = step >= holders;
      const int64_t nth = tail ? 2 * holders - 1 - step : step;
      const int64_t member = nth < wrapped ? nth : nth - wrapped + turn;
      const int64_t place = member - turn + (member >= turn ? 0 : ranks);
      const bool more = place + ranks < extra || (place < extra && ((place + lap) % 2 == 1) == tail);
      const int64_t tokens = share + more;
      if (tokens == 0) continue;
      const int64_t rank = first[index] + member;
      if (made.home.size() == opening || made.home.back() != rank) {
        made.starts.push_back(at);
        made.home.push_back(rank);
      }
      at += tokens;
    }
  }
  made.starts.push_back(ranges[ranges.size() - 1]);
  return made;
}

}  // namespace

void bind_zigzag(nb::module_& m) {
  m.def("emptiest", [](In<int64_t, "lengths"> lengths, In<int64_t, "size"> size, int64_t ranks) {
    New<int64_t> first(lengths.size());
    unlocked([&] { find_emptiest(lengths, size, ranks, first); });
    return first.array();
  });

  m.def("deal", [](In<int64_t, "ranges"> ranges, In<int64_t, "first"> first, In<int64_t, "size"> size) {
    Blocks made = unlocked([&] { return deal(ranges, first, size); });
    return nb::make_tuple(handed(std::move(made.starts)), handed(std::move(made.home)));
  });
}

}  // namespace apportion
