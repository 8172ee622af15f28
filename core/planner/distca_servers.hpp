// DistCA's migration: its units, which are rows of one home paired with the keys of another, or with all keys that they
// see; the holdings of servers; rules, shares and candidates.
//
//   rows       global tokens; in a folded pair, steps of a causal walk from both ends, see distca/homes.py
//   folded     a pair with length (tokens of its sequence) > 0; its only cell has steps [q0, q1) and tokens [k0, k1)
#pragma once

#include "ir/areas.hpp"
#include "owned.hpp"
#include "planner/numbers.hpp"

namespace apportion::distca {

struct Range {
  int64_t low = 0, high = 0;
  bool empty() const { return low >= high; }
  int64_t size() const { return high - low; }
  void extend(int64_t begin, int64_t end) {
    low = std::min(low, begin);
    high = std::max(high, end);
  }
};

// The empty range.
inline constexpr Range NOTHING{int64_t{1} << 62, 0};

inline Range overlap(Range a, Range b) { return {std::max(a.low, b.low), std::min(a.high, b.high)}; }

// Diagonals in global tokens.
struct Cell {
  int64_t q0, q1, k0, k1, dmin, dmax;
};

// The number of pairs of the first `step` steps of a causal walk: steps 2i and 2i + 1 together see length + 1 keys.
inline int64_t step_work(int64_t length, int64_t step) {
  const int64_t half = step / 2;
  return half * (length + 1) + step % 2 * (half + 1);
}

// Rows of block q against keys of blocks [k, k_end).
struct Pair {
  int64_t q, k, k_end, length;
  Column<const Cell> cells;

  bool folded() const { return length > 0; }

  // The number of token pairs of these rows.
  int64_t work(Range rows) const {
    if (folded()) return step_work(length, rows.high) - step_work(length, rows.low);
    int64_t total = 0;
    for (const Cell& cell : cells) {
      const Range common = overlap(rows, {cell.q0, cell.q1});
      if (common.empty()) continue;
      const int64_t keys = cell.k1 - cell.k0, offset = cell.k1 - common.low;
      total +=
          pairs_below(common.size(), keys, cell.dmax + offset) - pairs_below(common.size(), keys, cell.dmin - 1 + offset);
    }
    return total;
  }

  // The hull of the keys that these rows see; empty if there are none.
  Range keys_of(Range rows) const {
    if (folded()) {
      const int64_t begin = cells[0].k0;
      return {begin, begin + std::max((rows.high + 1) / 2, length - rows.low / 2)};
    }
    Range hull = NOTHING;
    for (const Cell& cell : cells) {
      const Range common = overlap(rows, {cell.q0, cell.q1});
      const Range keys = overlap({cell.k0, cell.k1}, {common.low - cell.dmax, common.high - cell.dmin});
      if (!common.empty() && !keys.empty()) hull.extend(keys.low, keys.high);
    }
    return {std::min(hull.low, hull.high), hull.high};
  }

  // The hull of the rows that see a key.
  Range rows_of(Range rows) const {
    Range hull = NOTHING;
    for (const Cell& cell : cells) {
      const Range common = overlap(rows, {cell.q0, cell.q1});
      if (!common.empty()) hull.extend(common.low, common.high);
    }
    return {std::min(hull.low, hull.high), hull.high};
  }
};

// How to cut a share: at a multiple of `grain` rows from `origin`, so that the part is the largest with at most `spare`
// more work than `work`, or, without spare, the one closest to `work`.
struct Cut {
  int64_t origin, grain;
  double work, spare;

  // The row x such that [x, high) is this part; `high` if there is none.
  int64_t last(const Pair& pair, Range rows) const {
    const auto exceeds = [&](int64_t row) { return work_of(pair, {row, rows.high}) > work; };
    const int64_t a = bisect(rows.low - 1, rows.high, exceeds) + 1;
    const int64_t below = std::max(rows.low, origin + (a - origin) / grain * grain);
    const int64_t above = std::min(origin + ((a - origin) / grain + 1) * grain, rows.high);
    const double limit = spare > 0 ? spare : work - work_of(pair, {above, rows.high});
    return work_of(pair, {below, rows.high}) - work <= limit ? below : above;
  }

  // The row y such that [low, y) is this part; `low` if there is none.
  int64_t first(const Pair& pair, Range rows) const {
    const auto fits = [&](int64_t row) { return work_of(pair, {rows.low, row}) <= work; };
    const int64_t a = bisect(rows.low, rows.high + 1, fits);
    const int64_t above = std::min(origin + (a - origin + grain - 1) / grain * grain, rows.high);
    const int64_t below = std::max(rows.low, origin + (a - origin) / grain * grain);
    const double limit = spare > 0 ? spare : work - work_of(pair, {rows.low, below});
    return work_of(pair, {rows.low, above}) - work <= limit ? above : below;
  }

 private:
  static double work_of(const Pair& pair, Range rows) { return static_cast<double>(pair.work(rows)); }
};

// The rows of each block that one server has: a range of query rows and a range of key rows, which only grow.
class Holding {
 public:
  Holding(Column<const int64_t> starts, Column<const int64_t> home)
      : starts_(starts), home_(home), q_(home.size()), k_(home.size()) {}

  // The blocks of which the server has rows, in order of arrival.
  const std::vector<int64_t>& queries() const { return q_blocks_; }
  const std::vector<int64_t>& keys() const { return k_blocks_; }
  int64_t query_rows(int64_t block) const { return q_[block].size(); }
  int64_t key_rows(int64_t block) const { return k_[block].size(); }

  void clear() {
    for (const int64_t block : q_blocks_) q_[block] = {};
    for (const int64_t block : k_blocks_) k_[block] = {};
    q_blocks_.clear();
    k_blocks_.clear();
  }

  void add(const Pair& pair, Range rows) {
    const Range seeing = pair.rows_of(rows);
    if (!seeing.empty()) grow(q_, q_blocks_, pair.q, seeing);
    const Range seen = pair.keys_of(rows);
    for (int64_t block = pair.k; block < pair.k_end; ++block) {
      const Range part = overlap(seen, {starts_[block], starts_[block + 1]});
      if (!part.empty()) grow(k_, k_blocks_, block, part);
    }
  }

  // The number of query rows that server `to`, whose holding this is, lacks for rows of a pair.
  int64_t missing_queries(const Pair& pair, Range rows, int64_t to) const {
    return home_[pair.q] == to ? 0 : missing(pair.rows_of(rows), q_[pair.q]);
  }

  // The number of missing key rows. kv_free: whether rows that are already there cost nothing.
  int64_t missing_keys(const Pair& pair, Range rows, int64_t to, bool kv_free) const {
    if (kv_free && pair.k_end == pair.k + 1 && home_[pair.k] == to) return 0;
    const Range seen = pair.keys_of(rows);
    if (!kv_free) return std::max(pair.length, seen.size());
    int64_t keys = 0;
    for (int64_t block = pair.k; block < pair.k_end; ++block)
      if (home_[block] != to) keys += missing_from(block, seen);
    return keys;
  }

  // The number of missing key rows of a block, for a range of keys.
  int64_t missing_from(int64_t block, Range keys) const {
    return missing(overlap(keys, {starts_[block], starts_[block + 1]}), k_[block]);
  }

 private:
  // The number of rows to add to a range, since the rows of a block form one range.
  static int64_t missing(Range wanted, Range present) {
    if (wanted.empty()) return 0;
    if (present.empty()) return wanted.size();
    return std::max(wanted.high, present.high) - std::min(wanted.low, present.low) - present.size();
  }

  static void grow(const Array<Range>& rows, std::vector<int64_t>& blocks, int64_t block, Range part) {
    if (rows[block].empty()) {
      rows[block] = part;
      blocks.push_back(block);
    } else {
      rows[block].extend(part.low, part.high);
    }
  }

  Column<const int64_t> starts_, home_;
  Array<Range> q_, k_;
  std::vector<int64_t> q_blocks_, k_blocks_;
};

// `Limits` of distca/parts.py. Sizes are bytes of a row; caps are bytes. excess, grain: of the current pass.
struct Rules {
  static constexpr std::size_t FIELDS = 14;
  double tolerance;  // fraction of its target by which a server may fall short
  bool two_sided;
  int64_t grain;  // cuts are multiples of this number of rows
  double spare;   // fraction of a target by which a part may exceed the requested work
  double threshold;
  int64_t q_bytes, o_bytes, kv_bytes, priced_q;
  bool kv_free, capped;
  int64_t send_cap, receive_cap, buffer_cap;
  double excess = 0;  // fraction of its target by which a server must exceed it to give work
};

struct Server {
  int64_t load = 0;  // pairs
  double target = 0;
  int64_t sent = 0, received = 0, held = 0;  // bytes
  std::vector<int64_t> shares;               // its own, last first, then received ones; includes shares that left

  double surplus() const { return real(load) - target; }
};

struct Share {
  int64_t pair;
  Range rows;
  int64_t server, work;
};

// A share of a surplus server. max_e: its E if moved as a whole to a server without any of its rows. once, per_pair: for
// a server without rows of the pair, the share's last rows cost at least `once + per_pair * work` bytes; 0: unknown.
struct Candidate {
  int64_t share;
  double max_e, work = 0, once = 0, per_pair = 0;

  bool surely_below(double floor, double amount) const { return amount < floor * (once + per_pair * amount); }
};

}  // namespace apportion::distca
