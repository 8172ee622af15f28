// Lower bound on foreign KV tokens; the head of apportion/planner/bounds.py explains it, with a drawing of `reach`.

#include "bind.hpp"
#include "ir/areas.hpp"
#include "planner/numbers.hpp"

namespace apportion {

namespace {

constexpr int64_t INF = int64_t{1} << 62;
// A margin in tokens; keeps rounded values below the true bound: pairs are rounded by at most 1,024, and only if
// rows have millions of pairs; their square roots are rounded too.
constexpr double SLACK = 1e-3;

// The quotient by a positive divisor, rounded up.
int64_t ceil_div(int64_t value, int64_t divisor) { return value > 0 ? (value - 1) / divisor + 1 : value / divisor; }

// The limits of a rank in tokens and pairs, and the number of ranks.
struct Caps {
  int64_t tokens, load, ranks;
};

// A range of keys, and how many of its tokens must leave home, counted once per rank that needs them.
struct ForeignRange {
  int64_t low, end, tokens;
};

struct Band {
  int64_t q0, q1, k0, k1, dmin, dmax;

  // True for rows that one rank cannot hold or cannot compute alone.
  bool is_wide(const Caps& caps) const {
    return q1 - q0 > caps.tokens || area_of(q0, q1, k0, k1, dmin, dmax) > caps.load;
  }
  // True if all rows see all keys from a common first key up to at least their own.
  bool is_stair() const { return dmin <= 0 && dmax >= q1 - 1 - k0 && k1 >= q1 && k0 <= q0; }
  bool joins(const Band& lower) const { return is_stair() && lower.is_stair() && k0 == lower.k0 && lower.q0 == q1; }
};

// The number of pairs of the first `rows` rows of a stair with a window, which is no longer than the stair.
double pairs_of(int64_t rows, int64_t window) {
  const double head = real(std::min(rows, window)), rest = real(std::max<int64_t>(rows - window, 0));
  return head * (head + 1) / 2 + rest * real(window);
}

// The inverse of `pairs_of`: the number of first rows with `pairs` pairs.
double rows_of(double pairs, int64_t window) {
  const double corner = real(window) * (real(window) + 1.0) / 2;
  const double inside = (std::sqrt(1 + 8 * std::min(pairs, corner)) - 1) / 2;
  return inside + std::max(pairs - corner, 0.0) / real(window);
}

// The foreign tokens of the part of a band whose rows see up to their own key. reach: lower bounds on ranks' reaches,
// largest first, as far as they extend beyond the first row.
ForeignRange stair_range(const Band& band, const Caps& caps) {
  const int64_t start = std::max(band.q0, band.k0), end = std::min(band.q1, band.k1);
  const bool plain = band.dmax >= end - 1 - band.k0;
  const int64_t low = plain ? band.k0 : start, size = end - low, skip = start - low;
  int64_t window = plain ? INF : band.dmax + 1;
  if (size <= 0 || band.dmin > 0 || window <= 1) return {low, end, 0};
  window = std::min(window, size);
  const double total = pairs_of(size, window), load = real(caps.load);
  const auto by_load = static_cast<int64_t>(std::ceil(total / real(std::max<int64_t>(caps.load, 1))));
  const int64_t ranks = std::max(ceil_div(size - skip, caps.tokens), by_load);
  const int64_t max_held = std::min(caps.tokens, static_cast<int64_t>(std::floor(rows_of(load, window) + SLACK)));
  int64_t holders = 0, reached = 0, strip = 0;
  for (int64_t before = 0; before <= std::clamp<int64_t>(ranks, 0, caps.ranks); ++before) {
    const double rows = rows_of(std::max(total - real(before) * load, 0.0), window);
    const int64_t reach = std::max(size - before * caps.tokens, static_cast<int64_t>(std::ceil(rows - SLACK)));
    if (reach <= skip) continue;
    ++holders;
    reached += reach;
    strip += std::min(std::max<int64_t>(reach - max_held, 0), window - 1);
  }
  return {low, end, plain ? reached - std::min(size, caps.tokens * holders) : strip};
}

// The foreign tokens for rows of a band that see all its keys: all ranks with such rows except
// one lack all these keys.
int64_t block_tokens(const Band& band, const Caps& caps) {
  const int64_t keys = band.k1 - band.k0;
  const int64_t upto = std::min(band.q1, band.k0 + std::min(band.dmax, INF / 2) + 1);
  const int64_t rows = upto - std::max(band.q0, band.k1 - 1 + std::max(band.dmin, -INF / 2));
  const int64_t per_rank = std::min(caps.tokens, std::max<int64_t>(caps.load / std::max<int64_t>(keys, 1), 1));
  return std::max<int64_t>(ceil_div(std::max<int64_t>(rows, 0), per_rank) - 1, 0) * keys;
}

// The foreign ranges of bands; bands of one stair are joined.
std::vector<ForeignRange> foreign(Matrix<const int64_t> bands, const Caps& caps) {
  std::vector<ForeignRange> ranges;
  const auto at = [&](int64_t row) {
    const Column<const int64_t> entry = bands[row];
    return Band{entry[0], entry[1], entry[2], entry[3], entry[4], entry[5]};
  };
  const auto add = [&](ForeignRange entry) {
    if (entry.tokens > 0) ranges.push_back(entry);
  };
  for (int64_t row = 0, first = 0; row < bands.rows(); ++row) {
    Band band = at(row);
    if (band.is_wide(caps)) add({band.k0, band.k1, block_tokens(band, caps)});
    if (row + 1 < bands.rows() && band.joins(at(row + 1))) continue;
    if (first < row) band = {at(first).q0, band.q1, band.k0, band.q1, 0, INF};
    if (band.is_wide(caps)) add(stair_range(band, caps));
    first = row + 1;
  }
  return ranges;
}

// The largest sum of tokens over disjoint ranges, by interval scheduling.
int64_t max_disjoint_sum(std::vector<ForeignRange> ranges) {
  std::ranges::sort(ranges, {}, &ForeignRange::end);
  std::vector<int64_t> ends{0}, best{0};
  for (const ForeignRange& range : ranges) {
    const auto before = std::upper_bound(ends.begin(), ends.end(), range.low) - ends.begin() - 1;
    best.push_back(std::max(best.back(), best[before] + range.tokens));
    ends.push_back(range.end);
  }
  return best.back();
}

}  // namespace

static const Area area("bounds", [](nb::module_& m) {
  def(m, "foreign_tokens(bands, token_cap, load_cap, ranks)",
      +[](Matrix<const int64_t> bands, int64_t token_cap, int64_t load_cap, int64_t ranks) {
        return max_disjoint_sum(foreign(bands, {token_cap, load_cap, ranks}));
      });
});

}  // namespace apportion
