#include "ir/verify/attended.hpp"

namespace apportion::verify {

static int64_t area(const WideBand& band) {
  return area_of(band.q0, band.q1, band.k0, band.k1, band.dmin, band.dmax);
}

static int64_t shared(const WideBand& a, const WideBand& b) {
  return area({std::max(a.q0, b.q0), std::min(a.q1, b.q1), std::max(a.k0, b.k0), std::min(a.k1, b.k1),
               std::max(a.dmin, b.dmin), std::min(a.dmax, b.dmax)});
}

std::optional<std::pair<Array<int64_t>, Array<int64_t>>> measure(const Bands& bands, const Bands& mask, int64_t steps) {
  Growing<int64_t> ends;  // the furthest q1 so far
  for (int64_t i = 0; i < mask.size(); ++i) ends.push_back(std::max(i > 0 ? ends.back() : mask[0].q1, mask[i].q1));
  Array<int64_t> areas(bands.size()), inside(bands.size());
  for (int64_t i = 0; i < bands.size(); ++i) {
    const WideBand band = bands[i];
    areas[i] = area(band);
    for (int64_t at = std::upper_bound(ends.begin(), ends.end(), band.q0) - ends.begin();
         at < mask.size() && mask.columns[0][at] < band.q1; ++at) {
      const WideBand other = mask[at];
      if (other.k0 < band.k1 && other.k1 > band.k0 && other.q1 > band.q0) inside[i] += shared(band, other);
      if (--steps < 0) return {};
    }
  }
  return std::pair(std::move(areas), std::move(inside));
}

// Pieces with connected query ranges form a group; inside it they are visited by ascending k0, and each is compared
// with those whose key range has not ended: none if tasks tile their queries by key.
std::optional<Growing<Overlap>> sweep(const Bands& bands, Column<const int64_t> order, int64_t steps, int64_t limit) {
  struct Piece {
    WideBand band;
    int64_t number;
  };
  Growing<Overlap> overlaps;
  std::vector<Piece> group;
  std::vector<const Piece*> active;
  for (int64_t next = 0; next < order.size();) {
    group.clear();
    active.clear();
    for (int64_t reach = 0; next < order.size(); ++next) {
      const WideBand band = bands[order[next]];
      if (!group.empty() && band.q0 >= reach) break;
      reach = group.empty() ? band.q1 : std::max(reach, band.q1);
      group.push_back({band, order[next]});
    }
    const auto by_key = [](const Piece& a, const Piece& b) { return a.band.k0 < b.band.k0; };
    if (!std::is_sorted(group.begin(), group.end(), by_key)) std::stable_sort(group.begin(), group.end(), by_key);
    for (const Piece& piece : group) {
      const WideBand& current = piece.band;
      steps -= static_cast<int64_t>(active.size());
      if (steps < 0) return {};
      std::erase_if(active, [&](const Piece* other) { return other->band.k1 <= current.k0; });
      for (const Piece* other : active) {
        if (overlaps.count() == limit || other->band.q0 >= current.q1 || current.q0 >= other->band.q1) continue;
        const auto [low, high] = std::minmax(other->number, piece.number);
        if (const int64_t pairs = shared(other->band, current); pairs > 0) overlaps.push_back({low, high, pairs});
      }
      active.push_back(&piece);
    }
  }
  return overlaps;
}

}  // namespace apportion::verify
