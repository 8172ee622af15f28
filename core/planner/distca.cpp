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
#include <numeric>

#include "bind.hpp"
#include "planner/distca_servers.hpp"

namespace apportion {

using std::int64_t;

namespace distca {
namespace {

constexpr double FREE = 1e-30;       // bytes assumed for a free move, whose E then exceeds all others
constexpr double SURELY = 1 - 1e-9;  // this fraction of an E is smaller than E, despite rounding
constexpr int64_t BESIDE = 4;        // candidates within this distance of the last best one are similar to it
constexpr int HALVINGS = 6;          // most halvings of a share to fit the caps
constexpr int64_t SWEEP = 32;        // number of servers between sweeps of the candidates

struct Choice {
  int64_t share = -1;
  double e = 0;
};

enum class Given { ROWS, NO_CUT, CAPPED };

// The outcome of the passes: `MigrationSummary` of distca/parts.py, without the imbalance.
struct Ended {
  int64_t passes = 0, moves = 0, forbidden = 0, below = 0, grain = 0;
};

class Migration {
 public:
  std::vector<Share> shares;
  std::vector<Server> servers;

  Migration(const std::vector<Pair>& pairs, Column<const int64_t> starts, Column<const int64_t> home,
            Column<const int64_t> origin, Column<const double> speeds, double speed, const Rules& rules,
            bool exhaustive)
      : servers(static_cast<std::size_t>(speeds.size())),
        pairs_(pairs),
        starts_(starts),
        home_(home),
        origin_(origin),
        rules_(rules),
        exhaustive_(exhaustive),
        holding_(starts, home),
        other_(starts, home),
        of_q_(static_cast<std::size_t>(home.size())),
        of_k_(of_q_),
        of_home_(servers.size()) {
    int64_t total = 0;
    for (int64_t i = 0; i < count(pairs); ++i) {
      const Pair& pair = pairs[i];
      const Range rows =
          pair.folded() ? Range{pair.cells[0].q0, pair.cells[0].q1} : Range{starts[pair.q], starts[pair.q + 1]};
      shares.push_back({i, rows, home[pair.q], pair.work(rows)});
      servers[home[pair.q]].load += shares.back().work;
      total += shares.back().work;
      of_q_[pair.q].push_back(i);
      for (int64_t k = pair.k; k < pair.k_end; ++k) of_k_[k].push_back(i);
    }
    for (int64_t i = count(shares) - 1; i >= 0; --i) servers[shares[i].at].shares.push_back(i);
    for (int64_t block = 0; block < home.size(); ++block) of_home_[home[block]].push_back(block);
    for (int64_t rank = 0; rank < speeds.size(); ++rank) servers[rank].target = real(total) / speed * speeds[rank];
    for (int64_t rank = 0; rules.capped && rank < speeds.size(); ++rank) recount(rank, 1);
  }

  // The paper's single pass; if two-sided, passes with half the previous tolerance each, which take only from servers
  // above the tolerance, with finer cuts if nothing moves.
  Ended run() {
    const double asked = rules_.tolerance, least = asked / (2 * real(count(servers)));
    Ended ended;
    while (true) {
      const int64_t before = ended.moves;
      ended.forbidden = ended.below = 0;
      ended.grain = rules_.grain;
      pass(ended);
      ++ended.passes;
      rules_.excess = asked;
      if (!rules_.two_sided || imbalance() <= asked || ended.below) return ended;
      if (ended.moves > before || !is_short()) {
        rules_.tolerance /= 2;
        if (rules_.tolerance >= least) continue;
        rules_.tolerance = asked;
      }
      if (ended.forbidden || rules_.grain == 1) return ended;
      rules_.grain /= 2;
    }
  }

  // The busiest server's load relative to its target, minus 1.
  double imbalance() const {
    double most = 1;
    for (const Server& server : servers)
      if (server.target > 0) most = std::max(most, real(server.load) / server.target);
    return most - 1;
  }

 private:
  bool needs_more(const Server& server) const { return real(server.load) < (1 - rules_.tolerance) * server.target; }
  bool is_short() const {
    return std::any_of(servers.begin(), servers.end(), [this](const Server& one) { return needs_more(one); });
  }
  bool gives(const Server& server) const { return server.surplus() > rules_.excess * server.target; }

  // One pass over the deficit servers.
  void pass(Ended& ended) {
    find_candidates();
    tried_.assign(shares.size(), -1);
    for (Candidate& one : candidates_) note_price(one);
    const std::vector<int64_t> order = by_deficit();
    for (int64_t turn = 0; turn < count(order); ++turn) {
      const int64_t to = order[turn];
      if (!needs_more(servers[to])) continue;
      if (turn % SWEEP == 0) sweep();
      if (candidates_.empty()) break;
      open(holding_, to);
      while (needs_more(servers[to])) {
        const Choice found = exhaustive_ ? best_of_all(to) : best(to);
        if (found.share < 0) break;
        if (found.e < rules_.threshold) {
          ++ended.below;
          break;
        }
        const Given given = give(found.share, to);
        if (given == Given::ROWS) {
          ++ended.moves;
          if (place_[found.share] >= 0) note_price(candidates_[place_[found.share]]);
        } else {
          tried_[found.share] = to;
          ended.forbidden += given == Given::CAPPED;
        }
      }
    }
  }

  // The servers below their targets, largest deficit first.
  std::vector<int64_t> by_deficit() const {
    std::vector<int64_t> order(servers.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [this](int64_t one, int64_t other) {
      return -servers[one].surplus() > -servers[other].surplus();
    });
    order.resize(static_cast<std::size_t>(std::count_if(servers.begin(), servers.end(), [this](const Server& server) {
      return server.target - real(server.load) > rules_.tolerance * server.target;
    })));
    return order;
  }

  // ---- candidates

  // Lists candidates by descending `most_e`, which the E of no part exceeds by much.
  void find_candidates() {
    candidates_.clear();
    place_.assign(shares.size(), -1);
    last_ = -1;
    for (int64_t i = 0; i < count(shares); ++i) {
      const Share& share = shares[i];
      const Server& server = servers[share.at];
      if (share.work == 0 || real(server.load) <= (1 + rules_.excess) * server.target) continue;
      const Pair& pair = pairs_[share.pair];
      const double rows = real(share.rows.size()) / (pair.folded() ? 2 : 1);
      const int64_t keys = starts_[pair.k_end] - starts_[pair.k];
      const double bytes = std::max(rows * real(rules_.priced_q) + real(keys * rules_.kv_bytes), 1.0);
      candidates_.push_back({i, real(share.work) / bytes});
    }
    std::stable_sort(candidates_.begin(), candidates_.end(),
                     [](const Candidate& one, const Candidate& other) { return one.most_e > other.most_e; });
    for (int64_t place = 0; place < count(candidates_); ++place) place_[candidates_[place].share] = place;
  }

  // Notes a lower bound on a candidate's price: the keys of its last row, and rows in proportion to work, less one for
  // rounding. Only a pair's first share has one: for servers with rows of the pair, `consider_held` covers no other.
  void note_price(Candidate& one) const {
    const Share& share = shares[one.share];
    one.work = real(share.work);
    one.once = one.a_pair = 0;
    if (one.share >= count(pairs_) || share.work == 0) return;
    const Pair& pair = pairs_[share.pair];
    const Range last = pair.keys_of({share.rows.high - 1, share.rows.high});
    int64_t seen = 0;
    for (const Cell& cell : pair.cells)
      if (cell.q0 < share.rows.high && share.rows.high <= cell.q1) seen = std::max(seen, share.rows.high - cell.q0);
    const double a_row = (pair.folded() ? 0.5 : 1.0) * real(rules_.priced_q);
    const double once = real(last.size() * rules_.kv_bytes) - a_row;
    if (seen < share.rows.size() || once <= 0) return;
    one.once = once;
    one.a_pair = a_row * real(share.rows.size()) / real(share.work);
  }

  // Keeps the candidates whose server still has a surplus.
  void sweep() {
    std::size_t kept = 0;
    for (const Candidate& one : candidates_) {
      const Server& server = servers[shares[one.share].at];
      place_[one.share] = -1;
      if (real(server.load) <= (1 + rules_.excess) * server.target) continue;
      place_[one.share] = static_cast<int64_t>(kept);
      candidates_[kept++] = one;
    }
    candidates_.resize(kept);
  }

  // ---- the best share

  // The bytes of rows of a pair for server `to`. For a head and its mirror image only the head's rows count, as in the
  // authors' code.
  double price(const Pair& pair, Range rows, int64_t to) const {
    const double queries = real(holding_.missing_queries(pair, rows, to));
    const int64_t keys = holding_.missing_keys(pair, rows, to, rules_.kv_free);
    const double counted = pair.folded() ? 0.5 * queries : queries;
    return std::max(FREE, counted * real(rules_.priced_q) + real(keys * rules_.kv_bytes));
  }

  // The E of a share for server `to`; 0 if it is not a candidate.
  double score(int64_t i, int64_t to) const {
    const Share& share = shares[i];
    const Server& server = servers[share.at];
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
  void consider_held(Choice& found, int64_t to, const std::vector<std::vector<int64_t>>& pairs_of,
                     const std::vector<int64_t>& got) const {
    Choice own;
    const auto look = [&](int64_t block) {
      for (const int64_t pair : pairs_of[block]) {
        if (!gives(servers[shares[pair].at])) continue;  // most do not
        const double e = score(pair, to);
        if (e > own.e) own = {pair, e};
      }
    };
    for (const int64_t block : of_home_[to]) look(block);
    for (const int64_t block : got) look(block);
    if (own.e > found.e) found = own;
  }

  // The best candidate for server `to`: first among pairs of which it has rows, then among the others until none can be
  // better. Skips most candidates: those certainly worse than the best so far, or than a neighbour of the last best
  // one, which is itself considered in its turn.
  Choice best(int64_t to) {
    Choice found;
    consider_held(found, to, of_q_, holding_.queries());
    consider_held(found, to, of_k_, holding_.keys());
    double floor = found.e;
    if (const int64_t near = last_ < 0 ? -1 : place_[last_]; near >= 0) {
      const int64_t end = std::min(near + BESIDE + 1, count(candidates_));
      for (int64_t place = std::max<int64_t>(near - BESIDE, 0); place < end; ++place) {
        const Candidate& one = candidates_[place];
        // the E of a part may slightly exceed `most_e`, which orders the candidates
        floor = std::max(floor, std::min(score(one.share, to), one.most_e));
      }
    }
    floor *= SURELY;
    const double deficit = -servers[to].surplus();
    for (const Candidate& one : candidates_) {
      if (one.most_e <= found.e) break;
      const double most = std::min(deficit, one.work);
      if (one.surely_below(floor, most)) continue;
      if (one.surely_below(floor, std::min(most, servers[shares[one.share].at].surplus()))) continue;
      const double e = score(one.share, to);
      if (e <= found.e) continue;
      found = {one.share, e};
      last_ = one.share;
      floor = std::max(floor, SURELY * e);
    }
    return found;
  }

  // Like `best`, but without skipping candidates, for tests.
  Choice best_of_all(int64_t to) const {
    Choice found;
    consider_held(found, to, of_q_, holding_.queries());
    consider_held(found, to, of_k_, holding_.keys());
    for (const Candidate& one : candidates_) {
      if (one.most_e <= found.e) break;
      const double e = score(one.share, to);
      if (e > found.e) found = {one.share, e};
    }
    return found;
  }

  // ---- moves

  // Moves rows of a share to server `to`, unless no cut is fine enough or caps forbid all cuts.
  Given give(int64_t i, int64_t to) {
    const Share share = shares[i];
    const Server &from = servers[share.at], &taker = servers[to];
    const Pair& pair = pairs_[share.pair];
    const double spare = rules_.spare * std::min(from.target, taker.target);
    double work = std::min({real(share.work), from.surplus(), -taker.surplus()});
    Range rows = share.rows;
    for (int halving = 0; halving < HALVINGS; ++halving, work *= 0.5) {
      if (work < real(share.work)) rows = part(share, work, halving == 0 ? spare : 0, to);
      const int64_t moved = pair.work(rows);
      if (moved == 0) return halving == 0 ? Given::NO_CUT : Given::CAPPED;
      if (rules_.capped && !fits(pair, rows, to)) continue;
      for (const int64_t server : {share.at, to}) recount_if_capped(server, -1);
      move(i, rows, moved, to);
      for (const int64_t server : {share.at, to}) recount_if_capped(server, 1);
      return Given::ROWS;
    }
    return Given::CAPPED;
  }

  // The last or first rows of the share with about `work`, whichever cost fewer bytes per pair; empty if no cut is fine
  // enough. With caps it is the last rows, which are the fewest; for a head and its mirror image, the innermost.
  Range part(const Share& share, double work, double spare, int64_t to) const {
    const Pair& pair = pairs_[share.pair];
    const Range rows = share.rows;
    if (pair.folded()) return {Cut{0, 2 * rules_.grain, work, spare}.last(pair, rows), rows.high};
    const Cut cut{origin_[pair.q], rules_.grain, work, spare};
    const Range first{rows.low, cut.first(pair, rows)}, last{cut.last(pair, rows), rows.high};
    const int64_t of_first = pair.work(first), of_last = pair.work(last);
    if (of_first == 0 || (rules_.capped && of_last > 0)) return last;
    if (of_last > 0 && price(pair, last, to) * real(of_first) <= price(pair, first, to) * real(of_last)) return last;
    return first;
  }

  // Moves the first, the last or all rows of the share, whose work is `moved`, to server `to`.
  void move(int64_t i, Range rows, int64_t moved, int64_t to) {
    Share& share = shares[i];
    servers[share.at].load -= moved;
    servers[to].load += moved;
    holding_.add(pairs_[share.pair], rows);
    if (rows.low <= share.rows.low && rows.high >= share.rows.high) {
      share.at = to;
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
    const std::vector<int64_t>& own = servers[server].shares;
    for (auto i = own.rbegin(); i != own.rend(); ++i)
      if (shares[*i].at == server) holding.add(pairs_[shares[*i].pair], shares[*i].rows);
  }

  // ---- bytes under caps

  void recount_if_capped(int64_t server, int64_t sign) {
    if (rules_.capped) recount(server, sign);
  }

  // Books (sign 1) or reverts (-1) the rows that the server receives and returns.
  void recount(int64_t server, int64_t sign) {
    open(other_, server);
    Server& own = servers[server];
    for (const int64_t block : other_.queries()) {
      if (home_[block] == server) continue;
      const int64_t rows = sign * other_.query_rows(block);
      Server& home = servers[home_[block]];
      own.received += rows * rules_.q_bytes;
      own.held += rows * rules_.q_bytes;
      own.sent += rows * rules_.o_bytes;
      home.sent += rows * rules_.q_bytes;
      home.received += rows * rules_.o_bytes;
    }
    for (const int64_t block : other_.keys()) {
      if (home_[block] == server) continue;
      const int64_t bytes = sign * other_.key_rows(block) * rules_.kv_bytes;
      own.received += bytes;
      own.held += bytes;
      servers[home_[block]].sent += bytes;
    }
  }

  // True if the caps allow `to` to compute rows of a pair.
  bool fits(const Pair& pair, Range rows, int64_t to) {
    const int64_t queries = holding_.missing_queries(pair, rows, to);
    const int64_t keys = holding_.missing_keys(pair, rows, to, true);
    Server &taker = servers[to], &of_q = servers[home_[pair.q]];
    const int64_t back = queries * rules_.o_bytes, from_q = queries * rules_.q_bytes;
    const int64_t arrive = from_q + keys * rules_.kv_bytes;
    if (taker.received + arrive > rules_.receive_cap || taker.held + arrive > rules_.buffer_cap) return false;
    if (taker.sent + back > rules_.send_cap || of_q.received + back > rules_.receive_cap) return false;
    leave(pair, rows, to, 1);
    of_q.sent += from_q;
    bool fit = from_q == 0 || of_q.sent <= rules_.send_cap;
    for (int64_t k = pair.k; k < pair.k_end; ++k)
      fit = fit && (home_[k] == to || servers[home_[k]].sent <= rules_.send_cap);
    of_q.sent -= from_q;
    leave(pair, rows, to, -1);
    return fit;
  }

  // Books (sign 1) or reverts (-1) the keys that leave their homes for rows of a pair on `to`.
  void leave(const Pair& pair, Range rows, int64_t to, int64_t sign) {
    const Range seen = pair.keys_of(rows);
    for (int64_t k = pair.k; k < pair.k_end; ++k)
      if (home_[k] != to) servers[home_[k]].sent += sign * holding_.missing_from(k, seen) * rules_.kv_bytes;
  }

  const std::vector<Pair>& pairs_;
  Column<const int64_t> starts_, home_, origin_;
  Rules rules_;
  bool exhaustive_;
  Holding holding_, other_;                                  // of the current server and of another one
  std::vector<std::vector<int64_t>> of_q_, of_k_, of_home_;  // pairs of query and of key blocks, blocks of ranks
  std::vector<Candidate> candidates_;
  std::vector<int64_t> place_;  // the index of each share among the candidates, or -1
  std::vector<int64_t> tried_;  // for each share, the last server for which it was tried in vain
  int64_t last_ = -1;           // the last share that was the best candidate
};

// Columns of `Pairs` of distca/parts.py.
struct Units {
  static constexpr std::size_t FIELDS = 12;
  Column<const int64_t> q, k, k_end, length, starts, first, q0, q1, k0, k1, dmin, dmax;
};

struct Moved {
  int64_t pair, low, high, at;
};

struct Filled {
  int64_t load, sent, received, held;
};

auto migrate(const Units& of, Column<const int64_t> home, Column<const int64_t> origin, Column<const double> speeds,
             double speed, const Rules& rules, bool exhaustive) {
  Growing<Cell> cells;
  for (int64_t i = 0; i < of.q0.size(); ++i)
    cells.push_back({of.q0[i], of.q1[i], of.k0[i], of.k1[i], of.dmin[i], of.dmax[i]});
  const Column<const Cell> all = cells;
  std::vector<Pair> pairs;
  for (int64_t i = 0; i < of.q.size(); ++i)
    pairs.push_back({of.q[i], of.k[i], of.k_end[i], of.length[i], all.slice(of.first[i], of.first[i + 1])});
  Migration migration(pairs, of.starts, home, origin, speeds, speed, rules, exhaustive);
  const Ended ended = migration.run();
  Growing<Moved> shares;
  for (const Share& one : migration.shares) shares.push_back({one.pair, one.rows.low, one.rows.high, one.at});
  Growing<Filled> servers;
  for (const Server& one : migration.servers) servers.push_back({one.load, one.sent, one.received, one.held});
  return std::tuple(std::move(shares), std::move(servers),
                    std::tuple(ended.passes, ended.moves, ended.forbidden, ended.below, migration.imbalance(),
                               ended.grain));
}

}  // namespace
}  // namespace distca

static const Area area("distca", [](nb::module_& m) {
  def(m, "migrate(pairs, home, origin, speeds, speed, limits, exhaustive)", distca::migrate);
});

}  // namespace apportion
