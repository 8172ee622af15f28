// Zig-zag chunks: chunks i and 2N-1-i of a range are on the i-th of its N ranks. See apportion/planner/place/zigzag.py.

#include "bind.hpp"

namespace apportion {

namespace {

// For each range, the first of its `size` consecutive ranks, those that hold the fewest tokens; ranges are placed one
// after another, the longest first.
Array<int64_t> find_emptiest(Column<const int64_t> lengths, Column<const int64_t> size, int64_t ranks) {
  const auto order = ordered(lengths.size(), [&](int64_t a, int64_t b) { return lengths[a] > lengths[b]; });
  Array<int64_t> first(lengths.size());
  const Array<int64_t> used(ranks);
  for (const int64_t index : order) {
    const int64_t width = size[index];
    int64_t load = std::accumulate(used.begin(), used.begin() + width, int64_t{0}), best = 0, min_load = load;
    for (int64_t begin = 1; begin + width <= ranks; ++begin) {
      load += used[begin + width - 1] - used[begin - 1];
      if (load < min_load) {
        best = begin;
        min_load = load;
      }
    }
    first[index] = best;
    for (int64_t rank = best; rank < best + width; ++rank) used[rank] += lengths[index] / width;
  }
  return first;
}

// The blocks of ranges that are cut zig-zag, each for its own group of ranks: `deal` of zigzag.py.
std::pair<Growing<int64_t>, Growing<int64_t>> deal(Column<const int64_t> ranges, Column<const int64_t> first,
                                                   Column<const int64_t> size) {
  Growing<int64_t> starts, home;
  for (int64_t index = 0; index < first.size(); ++index) {
    int64_t at = ranges[index];
    const int64_t ranks = size[index], length = ranges[index + 1] - at, lap = at / ranks, turn = at % ranks;
    const int64_t opening = home.count();
    const int64_t share = length / (2 * ranks), extra = length - 2 * ranks * share;
    // the ranks that hold any token: all, or `extra` of them from `turn` on, wrapped to [0, wrapped) and [turn, ...)
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
      if (home.count() == opening || home.back() != rank) {
        starts.push_back(at);
        home.push_back(rank);
      }
      at += tokens;
    }
  }
  starts.push_back(ranges[ranges.size() - 1]);
  return {std::move(starts), std::move(home)};
}

}  // namespace

static const Area area("zigzag", [](nb::module_& m) {
  def(m, "emptiest(lengths, size, ranks)", find_emptiest);
  def(m, "deal(ranges, first, size)", deal);
});

}  // namespace apportion
