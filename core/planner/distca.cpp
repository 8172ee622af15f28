// The greedy migration of DistCA (section 4.2): moves shares of pairs (apportion/planner/place/distca/parts.py) from
// surplus to deficit servers.
//
// Servers are filled in the order of their deficits. For each, every share of a surplus server could give
//
//     dF_max = min(the share's work, its server's surplus, the deficit)
//
// from its first or last rows, for V bytes (Appendix B); the share with the largest E = dF_max / V gives. Rows that the
// server already has, at home or for other pairs, can be free. Passes halve the tolerance, and then the step of cuts,
// until loads are within the tolerance on both sides.

#include "bind.hpp"
#include "planner/distca_servers.hpp"

namespace apportion::distca {

namespace {

constexpr double FREE = 1e-30;       // bytes assumed for a free move, whose E then exceeds all others
constexpr double ROUNDING_MARGIN = 1 - 1e-9;  // this fraction of an E is smaller than E, despite rounding
constexpr int64_t NEARBY = 4;        // candidates within this distance of the last best one are similar to it
constexpr int HALVINGS = 6;          // maximum halvings of a share to fit the caps
constexpr int64_t SWEEP = 32;        // number of servers between sweeps of the candidates

struct Choice {
  int64_t share = -1;
  double e = 0;
};

enum class Outcome { ROWS, NO_CUT, CAPPED };

// The outcome of the passes: `MigrationSummary` of distca/parts.py, without the imbalance.
struct Summary {
  int64_t passes = 0, moves = 0, forbidden = 0, below = 0, grain = 0;
};

class Migration {
 public:
  Growing<Share> shares;
  std::vector<Server> servers;

  Migration(const std::vector<Pair>& pairs, Column<const int64_t> starts, Column<const int64_t> home,
            Column<const int64_t> origin, Column<const double> speeds, double speed, const Rules& rules,
            bool exhaustive)
      : servers(static_cast<std::size_t>(speeds.size())),
        pairs_(pairs), starts_(starts), home_(home), origin_(origin), rules_(rules), exhaustive_(exhaustive) {
    int64_t total = 0;
    for (int64_t i = 0; i < count(pairs); ++i) {
      const Pair& pair = pairs[i];
      const Range rows =
          pair.folded() ? Range{pair.cells[0].q0, pair.cells[0].q1} : Range{starts[pair.q], starts[pair.q + 1]};
      shares.push_back({i, rows, home[pair.q], pair.work(rows)});
      servers[home[pair.q]].load += shares.back().work;
      total += shares.back().work;
      pairs_of_q_[pair.q].push_back(i);
      for (int64_t k = pair.k; k < pair.k_end; ++k) pairs_of_k_[k].push_back(i);
    }
    for (int64_t i = count(shares) - 1; i >= 0; --i) servers[shares[i].server].shares.push_back(i);
    for (int64_t block = 0; block < home.size(); ++block) home_blocks_[home[block]].push_back(block);
    for (int64_t rank = 0; rank < speeds.size(); ++rank) servers[rank].target = real(total) / speed * speeds[rank];
    for (int64_t rank = 0; rank < speeds.size(); ++rank) recount(rank, 1);
  }

  // The paper's single pass; if two-sided, passes with half the previous tolerance each, which take only from servers
  // above the tolerance, with finer cuts if nothing moves.
  Summary run() {
    const double requested = rules_.tolerance, min_tolerance = requested / (2 * real(count(servers)));
    Summary summary;
    while (true) {
      const int64_t before = summary.moves;
      summary.forbidden = summary.below = 0;
      summary.grain = rules_.grain;
      pass(summary);
      ++summary.passes;
      rules_.excess = requested;
      if (!rules_.two_sided || imbalance() <= requested || summary.below) return summary;
      if (summary.moves > before || !is_short()) {
        rules_.tolerance /= 2;
        if (rules_.tolerance >= min_tolerance) continue;
        rules_.tolerance = requested;
      }
      if (summary.forbidden || rules_.grain == 1) return summary;
      rules_.grain /= 2;
    }
  }

  // The busiest server's load relative to its target, minus 1.
  double imbalance() const {
    double largest = 1;
    for (const Server& server : servers)
      if (server.target > 0) largest = std::max(largest, real(server.load) / server.target);
    return largest - 1;
  }

 private:
  using Numbers = Growing<std::vector<int64_t>>;

  bool needs_more(const Server& server) const { return real(server.load) < (1 - rules_.tolerance) * server.target; }
  bool is_short() const {
    return std::any_of(servers.begin(), servers.end(), [this](const Server& server) { return needs_more(server); });
  }
  bool gives(const Server& server) const { return server.surplus() > rules_.excess * server.target; }

  // One pass over the deficit servers.
  void pass(Summary& summary) {
    find_candidates();
    tried_.assign(shares.size(), -1);
    for (Candidate& candidate : candidates_) note_price(candidate);
    const Growing<int64_t> order = by_deficit();
    for (int64_t turn = 0; turn < count(order); ++turn) {
      const int64_t to = order[turn];
      if (!needs_more(servers[to])) continue;
      if (turn % SWEEP == 0) sweep();
      if (candidates_.empty()) break;
      open(holding_, to);
      while (needs_more(servers[to])) {
        const Choice choice = best(to);
        if (choice.share < 0) break;
        if (choice.e < rules_.threshold) {
          ++summary.below;
          break;
        }
        const Outcome outcome = give(choice.share, to);
        if (outcome == Outcome::ROWS) {
          ++summary.moves;
          if (place_[choice.share] >= 0) note_price(candidates_[place_[choice.share]]);
        } else {
          tried_[choice.share] = to;
          summary.forbidden += outcome == Outcome::CAPPED;
        }
      }
    }
  }

  // The servers below their targets, largest deficit first.
  Growing<int64_t> by_deficit() const {
    Growing<int64_t> order = ordered(count(servers), [this](int64_t a, int64_t b) {
      return -servers[a].surplus() > -servers[b].surplus();
    });
    order.resize(static_cast<std::size_t>(std::count_if(servers.begin(), servers.end(), [this](const Server& server) {
      return server.target - real(server.load) > rules_.tolerance * server.target;
    })));
    return order;
  }

  // ---- candidates

  // Lists candidates by descending `max_e`; no part of a share has an E that exceeds it by much.
  void find_candidates() {
    candidates_.clear();
    place_.assign(shares.size(), -1);
    last_ = -1;
    for (int64_t i = 0; i < count(shares); ++i) {
      const Share& share = shares[i];
      const Server& server = servers[share.server];
      if (share.work == 0 || real(server.load) <= (1 + rules_.excess) * server.target) continue;
      const Pair& pair = pairs_[share.pair];
      const double rows = real(share.rows.size()) / (pair.folded() ? 2 : 1);
      const int64_t keys = starts_[pair.k_end] - starts_[pair.k];
      const double bytes = std::max(rows * real(rules_.priced_q) + real(keys * rules_.kv_bytes), 1.0);
      candidates_.push_back({i, real(share.work) / bytes});
    }
    std::ranges::stable_sort(candidates_, std::greater(), &Candidate::max_e);
    for (int64_t place = 0; place < count(candidates_); ++place) place_[candidates_[place].share] = place;
  }

  // Notes a lower bound on a candidate's price: the keys of its last row, and rows in proportion to work, less one for
  // rounding. Only for a pair's first share: `consider_blocks` considers no other for servers with rows of the pair.
  void note_price(Candidate& candidate) const {
    const Share& share = shares[candidate.share];
    candidate.work = real(share.work);
    candidate.once = candidate.per_pair = 0;
    if (candidate.share >= count(pairs_) || share.work == 0) return;
    const Pair& pair = pairs_[share.pair];
    const Range last = pair.keys_of({share.rows.high - 1, share.rows.high});
    int64_t seen = 0;
    for (const Cell& cell : pair.cells)
      if (cell.q0 < share.rows.high && share.rows.high <= cell.q1) seen = std::max(seen, share.rows.high - cell.q0);
    const double per_row = (pair.folded() ? 0.5 : 1.0) * real(rules_.priced_q);
    const double once = real(last.size() * rules_.kv_bytes) - per_row;
    if (seen < share.rows.size() || once <= 0) return;
    candidate.once = once;
    candidate.per_pair = per_row * real(share.rows.size()) / real(share.work);
  }

  // Keeps the candidates whose server still has a surplus.
  void sweep() {
    std::size_t kept = 0;
    for (const Candidate& candidate : candidates_) {
      const Server& server = servers[shares[candidate.share].server];
      place_[candidate.share] = -1;
      if (real(server.load) <= (1 + rules_.excess) * server.target) continue;
      place_[candidate.share] = static_cast<int64_t>(kept);
      candidates_[kept++] = candidate;
    }
    candidates_.resize(kept);
  }

  // ---- the best share

  // The bytes to send for `rows` of a pair to server `to`. For a head and its mirror image only the head's rows count,
  // as in the authors' code.
  double price(const Pair& pair, Range rows, int64_t to) const {
    const double queries = real(holding_.missing_queries(pair, rows, to));
    const int64_t keys = holding_.missing_keys(pair, rows, to, rules_.kv_free);
    const double counted = pair.folded() ? 0.5 * queries : queries;
    return std::max(FREE, counted * real(rules_.priced_q) + real(keys * rules_.kv_bytes));
  }

  // The E of a share for server `to`; 0 if it is not a candidate.
  double score(int64_t i, int64_t to) const {
    const Share& share = shares[i];
    const Server& server = servers[share.server];
    if (!gives(server) || tried_[i] == to || share.work == 0) return 0;
    const double whole = real(share.work);
    const double work = std::min({whole, server.surplus(), -servers[to].surplus()});
    Range rows = share.rows;
    if (work < whole)
      rows.low = rows.high - std::max<int64_t>(1, static_cast<int64_t>(real(rows.size()) * (work / whole)));
    return work / price(pairs_[share.pair], rows, to);
  }

  // Considers the first share, numbered like its pair, of every pair of which `to` has queries or keys; later shares
  // went to servers with a deficit.
  void consider_blocks(Choice& choice, int64_t to, const Numbers& pairs_of, const std::vector<int64_t>& blocks) const {
    Choice local;
    const auto look = [&](int64_t block) {
      for (const int64_t pair : pairs_of[block]) {
        if (!gives(servers[shares[pair].server])) continue;  // most do not
        const double e = score(pair, to);
        if (e > local.e) local = {pair, e};
      }
    };
    for (const int64_t block : home_blocks_[to]) look(block);
    for (const int64_t block : blocks) look(block);
    if (local.e > choice.e) choice = local;
  }

  // The best candidate for server `to`: first among pairs of which it has rows, then among the others until none can be
  // better. Skips most candidates, except in tests: those that are certainly worse than the best so far, or than a
  // candidate near the previous best one.
  Choice best(int64_t to) {
    Choice choice;
    consider_blocks(choice, to, pairs_of_q_, holding_.queries());
    consider_blocks(choice, to, pairs_of_k_, holding_.keys());
    double floor = choice.e;
    if (const int64_t near = last_ < 0 ? -1 : place_[last_]; near >= 0) {
      const int64_t end = std::min(near + NEARBY + 1, count(candidates_));
      for (int64_t place = std::max<int64_t>(near - NEARBY, 0); place < end; ++place) {
        const Candidate& candidate = candidates_[place];
        // the E of a part may slightly exceed `max_e`, which orders the candidates
        floor = std::max(floor, std::min(score(candidate.share, to), candidate.max_e));
      }
    }
    floor *= exhaustive_ ? 0 : ROUNDING_MARGIN;
    const double deficit = -servers[to].surplus();
    for (const Candidate& candidate : candidates_) {
      if (candidate.max_e <= choice.e) break;
      const double limit = std::min(deficit, candidate.work);
      if (candidate.surely_below(floor, limit)) continue;
      if (candidate.surely_below(floor, std::min(limit, servers[shares[candidate.share].server].surplus()))) continue;
      const double e = score(candidate.share, to);
      if (e <= choice.e) continue;
      choice = {candidate.share, e};
      last_ = candidate.share;
      if (!exhaustive_) floor = std::max(floor, ROUNDING_MARGIN * e);
    }
    return choice;
  }

  // ---- moves

  // Moves rows of a share to server `to`, unless no cut is fine enough or caps forbid all cuts.
  Outcome give(int64_t i, int64_t to) {
    const Share share = shares[i];
    const Server &from = servers[share.server], &taker = servers[to];
    const Pair& pair = pairs_[share.pair];
    const double spare = rules_.spare * std::min(from.target, taker.target);
    double work = std::min({real(share.work), from.surplus(), -taker.surplus()});
    Range rows = share.rows;
    for (int halving = 0; halving < HALVINGS; ++halving, work *= 0.5) {
      if (work < real(share.work)) rows = part(share, work, halving == 0 ? spare : 0, to);
      const int64_t moved = pair.work(rows);
      if (moved == 0) return halving == 0 ? Outcome::NO_CUT : Outcome::CAPPED;
      if (rules_.capped && !fits(pair, rows, to)) continue;
      for (const int64_t server : {share.server, to}) recount(server, -1);
      move(i, rows, moved, to);
      for (const int64_t server : {share.server, to}) recount(server, 1);
      return Outcome::ROWS;
    }
    return Outcome::CAPPED;
  }

  // The last or first rows of the share with about `work`, whichever cost fewer bytes per pair; empty if no cut is fine
  // enough. With caps: the last rows, which are the fewest. For a head and its mirror image: always the innermost rows.
  Range part(const Share& share, double work, double spare, int64_t to) const {
    const Pair& pair = pairs_[share.pair];
    const Range rows = share.rows;
    if (pair.folded()) return {Cut{0, 2 * rules_.grain, work, spare}.last(pair, rows), rows.high};
    const Cut cut{origin_[pair.q], rules_.grain, work, spare};
    const Range first{rows.low, cut.first(pair, rows)}, last{cut.last(pair, rows), rows.high};
    const int64_t first_work = pair.work(first), last_work = pair.work(last);
    if (first_work == 0 || (rules_.capped && last_work > 0)) return last;
    if (last_work > 0 && price(pair, last, to) * real(first_work) <= price(pair, first, to) * real(last_work)) return last;
    return first;
  }

  // Moves the first, the last or all rows of the share, whose work is `moved`, to server `to`.
  void move(int64_t i, Range rows, int64_t moved, int64_t to) {
    Share& share = shares[i];
    servers[share.server].load -= moved;
    servers[to].load += moved;
    holding_.add(pairs_[share.pair], rows);
    if (rows.low <= share.rows.low && rows.high >= share.rows.high) {
      share.server = to;
      servers[to].shares.push_back(i);
      return;
    }
    share.work -= moved;
    if (rows.low > share.rows.low)
      share.rows.high = rows.low;
    else
      share.rows.low = rows.high;
    servers[to].shares.push_back(count(shares));
    shares.push_back({share.pair, rows, to, moved});
    place_.push_back(-1);
    tried_.push_back(-1);
  }

  // Fills the holding of a server, newest shares first.
  void open(Holding& holding, int64_t server) const {
    holding.clear();
    const std::vector<int64_t>& numbers = servers[server].shares;
    for (auto i = numbers.rbegin(); i != numbers.rend(); ++i)
      if (shares[*i].server == server) holding.add(pairs_[shares[*i].pair], shares[*i].rows);
  }

  // ---- bytes under caps

  // Books (sign 1) or reverts (-1) the rows that the server receives and returns, if there are caps.
  void recount(int64_t server, int64_t sign) {
    if (!rules_.capped) return;
    open(other_, server);
    Server& taker = servers[server];
    for (const int64_t block : other_.queries()) {
      if (home_[block] == server) continue;
      const int64_t rows = sign * other_.query_rows(block);
      Server& home = servers[home_[block]];
      taker.received += rows * rules_.q_bytes;
      taker.held += rows * rules_.q_bytes;
      taker.sent += rows * rules_.o_bytes;
      home.sent += rows * rules_.q_bytes;
      home.received += rows * rules_.o_bytes;
    }
    for (const int64_t block : other_.keys()) {
      if (home_[block] == server) continue;
      const int64_t bytes = sign * other_.key_rows(block) * rules_.kv_bytes;
      taker.received += bytes;
      taker.held += bytes;
      servers[home_[block]].sent += bytes;
    }
  }

  // True if the caps allow `to` to compute rows of a pair.
  bool fits(const Pair& pair, Range rows, int64_t to) {
    const int64_t queries = holding_.missing_queries(pair, rows, to);
    const int64_t keys = holding_.missing_keys(pair, rows, to, true);
    Server &taker = servers[to], &query_home = servers[home_[pair.q]];
    const int64_t result_bytes = queries * rules_.o_bytes, query_bytes = queries * rules_.q_bytes;
    const int64_t arriving = query_bytes + keys * rules_.kv_bytes;
    if (taker.received + arriving > rules_.receive_cap || taker.held + arriving > rules_.buffer_cap) return false;
    if (taker.sent + result_bytes > rules_.send_cap || query_home.received + result_bytes > rules_.receive_cap) return false;
    add_sent(pair, rows, to, 1);
    query_home.sent += query_bytes;
    bool fits_all = query_bytes == 0 || query_home.sent <= rules_.send_cap;
    for (int64_t k = pair.k; k < pair.k_end; ++k)
      fits_all = fits_all && (home_[k] == to || servers[home_[k]].sent <= rules_.send_cap);
    query_home.sent -= query_bytes;
    add_sent(pair, rows, to, -1);
    return fits_all;
  }

  // Books (sign 1) or reverts (-1) the keys that leave their homes for rows of a pair on `to`.
  void add_sent(const Pair& pair, Range rows, int64_t to, int64_t sign) {
    const Range seen = pair.keys_of(rows);
    for (int64_t k = pair.k; k < pair.k_end; ++k)
      if (home_[k] != to) servers[home_[k]].sent += sign * holding_.missing_from(k, seen) * rules_.kv_bytes;
  }

  const std::vector<Pair>& pairs_;
  Column<const int64_t> starts_, home_, origin_;
  Rules rules_;
  bool exhaustive_;
  Holding holding_{starts_, home_}, other_{starts_, home_};  // of the current server and of another one
  Numbers pairs_of_q_ = Numbers(home_.size()), pairs_of_k_ = pairs_of_q_;  // pairs of query and of key blocks
  Numbers home_blocks_ = Numbers(count(servers));                          // blocks of ranks
  std::vector<Candidate> candidates_;
  std::vector<int64_t> place_;  // the index of each share among the candidates, or -1
  std::vector<int64_t> tried_;  // for each share, the last server for which it was tried in vain
  int64_t last_ = -1;           // the last share that was the best candidate
};

// Columns of `Pairs` of distca/parts.py.
struct Units {
  Column<const int64_t> q, k, k_end, length, starts, first, q0, q1, k0, k1, dmin, dmax;
};

struct ServerRow {
  int64_t load, sent, received, held;
};

auto migrate(const Units& units, Column<const int64_t> home, Column<const int64_t> origin, Column<const double> speeds,
             double speed, const Rules& rules, bool exhaustive) {
  Growing<Cell> cells;
  for (int64_t i = 0; i < units.q0.size(); ++i)
    cells.push_back({units.q0[i], units.q1[i], units.k0[i], units.k1[i], units.dmin[i], units.dmax[i]});
  const Column<const Cell> all = cells;
  std::vector<Pair> pairs;
  for (int64_t i = 0; i < units.q.size(); ++i)
    pairs.push_back({units.q[i], units.k[i], units.k_end[i], units.length[i], all.slice(units.first[i], units.first[i + 1])});
  Migration migration(pairs, units.starts, home, origin, speeds, speed, rules, exhaustive);
  const Summary summary = migration.run();
  Growing<ServerRow> servers;
  for (const Server& item : migration.servers) servers.push_back({item.load, item.sent, item.received, item.held});
  return std::tuple(std::move(migration.shares), std::move(servers),
                    std::tuple(summary.passes, summary.moves, summary.forbidden, summary.below, migration.imbalance(),
                               summary.grain));
}

}  // namespace

static const Area area("distca", [](nb::module_& m) {
  def(m, "migrate(pairs, home, origin, speeds, speed, limits, exhaustive)", migrate);
});

}  // namespace apportion::distca
