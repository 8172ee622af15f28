// Attention pairs of tasks as bands of tokens; exact areas and overlaps of bands.
#pragma once

#include "ir/areas.hpp"
#include "ir/verify/tokens.hpp"
#include "owned.hpp"

namespace apportion::verify {

// Runs of consecutive tokens on the axis of addresses (homes.py), found through an index: for every 2^shift addresses,
// the run of the first one. starts: the address of each run, and the end; tokens: the first token of each run.
class Homes {
 public:
  Homes(Column<const int64_t> starts, Column<const int64_t> tokens) : starts_(starts), tokens_(tokens) {
    const int64_t end = starts[starts.size() - 1];
    while (end >> shift_ > tokens.size()) ++shift_;
    for (int64_t address = 0, run = 0; address <= end; address += int64_t{1} << shift_) {
      while (run + 1 < tokens.size() && starts[run + 1] <= address) ++run;
      index_.push_back(run);
    }
    index_.push_back(tokens.size());
  }

  int64_t start(int64_t run) const { return starts_[run]; }
  int64_t end(int64_t run) const { return starts_[run + 1]; }
  // The difference between the tokens and the addresses of a run.
  int64_t shift(int64_t run) const { return tokens_[run] - starts_[run]; }
  int64_t run_of(int64_t address) const {
    const int64_t at = address >> shift_;
    const int64_t* first = starts_.begin() + index_[at];
    const int64_t* last = starts_.begin() + std::min(index_[at + 1] + 1, tokens_.size());
    return std::upper_bound(first, last, address) - starts_.begin() - 1;
  }

 private:
  Column<const int64_t> starts_, tokens_;
  int shift_ = 0;
  Growing<int64_t> index_;
};

// A band of tokens.
struct WideBand {
  int64_t q0, q1, k0, k1, dmin, dmax;
};

// Calls keep(band of tokens, piece) for each run of queries and each run of their visible keys. Stops after `limit` calls
// and returns false if there are more.
template <class Keep>
bool cut(Column<const Piece> pieces, const Homes& homes, int64_t limit, Keep&& keep) {
  int64_t count = 0;
  for (const Piece& piece : pieces) {
    const auto [q, q_end, k, k_end, dmin, dmax] =
        WideBand{piece.band.q0, piece.band.q1, piece.band.k0, piece.band.k1, piece.band.dmin, piece.band.dmax};
    for (int64_t run = homes.run_of(q), q0 = q; q0 < q_end; q0 = homes.end(run++)) {
      const int64_t q1 = std::min(homes.end(run), q_end);
      const int64_t k0 = std::max(k, q0 - dmax), k1 = std::min(k_end, q1 - dmin);  // keys that these queries see
      if (k0 >= k1) continue;
      const int64_t q_shift = homes.shift(run);
      for (int64_t other = homes.run_of(k0), at = k0; at < k1; at = homes.end(other++)) {
        if (++count > limit) return false;
        const int64_t k_shift = homes.shift(other), move = q_shift - k_shift;
        WideBand band{q0 + q_shift, q1 + q_shift, std::max(homes.start(other), k) + k_shift,
                      std::min(homes.end(other), k_end) + k_shift, dmin + move, dmax + move};
        band.dmin = std::max(band.dmin, band.q0 - band.k1 + 1);
        band.dmax = std::min(band.dmax, band.q1 - band.k0 - 1);
        keep(band, piece);
      }
    }
  }
  return true;
}

// Bands as columns, int64 [6, bands].
struct Bands {
  using Given = Matrix<const int64_t>;
  explicit Bands(const Given& given) : columns(given) {}
  Given columns;

  int64_t size() const { return columns.columns(); }
  WideBand operator[](int64_t i) const {
    return {columns[0][i], columns[1][i], columns[2][i], columns[3][i], columns[4][i], columns[5][i]};
  }
};

struct Overlap {
  int64_t first, second, pairs;
};

inline int64_t area(const WideBand& band) {
  return area_of(band.q0, band.q1, band.k0, band.k1, band.dmin, band.dmax);
}

inline int64_t shared(const WideBand& a, const WideBand& b) {
  return area({std::max(a.q0, b.q0), std::min(a.q1, b.q1), std::max(a.k0, b.k0), std::min(a.k1, b.k1),
               std::max(a.dmin, b.dmin), std::min(a.dmax, b.dmax)});
}

// The areas of bands, and of their parts inside a mask, which is sorted by q0. None if this takes more than `steps`
// comparisons.
inline std::optional<std::pair<Array<int64_t>, Array<int64_t>>> measure(const Bands& bands, const Bands& mask,
                                                                               int64_t steps) {
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

// The first overlaps, at most `limit`. order: the order of bands by (q0, k0). None if this takes more than `steps`
// comparisons.
//
// Pieces with connected query ranges form a group; inside it they are visited by ascending k0, and each is compared
// with those whose key range has not ended: none if tasks tile their queries by key.
inline std::optional<Growing<Overlap>> sweep(const Bands& bands, Column<const int64_t> order, int64_t steps,
                                                int64_t limit) {
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
