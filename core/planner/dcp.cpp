// DCP: exchanges homes within nodes to relieve the busiest links, and divides cells into divisions (Listing 3).

#include "bind.hpp"
#include "ir/sorting.hpp"
#include "planner/numbers.hpp"

namespace apportion {

namespace {

constexpr double GAIN = 0.01;  // an exchange shortens the longer of the two ranks' times by at least this fraction
// The weight of bytes that an exchange adds within the node, relative to its time on one rank's links. Of the values 0
// to 16, higher ones save more bytes; up to this one, they lose little time.
constexpr double ADDED_BYTES_WEIGHT = 8.0;
constexpr int64_t TURNS = 2;  // maximum exchanges per block

// A hypergraph and the ranks of its vertices. The first vertices are the blocks; each hyperedge starts with its source
// block.
struct Placement {
  Column<const int64_t> ptr, pins, price, rank;
  int64_t queries;  // number of hyperedges of queries, which come first
};

// GB/s of a rank's links within its node, and of its share of the NICs.
struct Links {
  double within, between;
};

// The bytes that a rank sends and receives within its node [0] and between nodes [1].
struct Traffic {
  int64_t sent[2] = {}, received[2] = {};

  double time(Links gbs, int64_t more_sent = 0, int64_t more_received = 0, int64_t more_away = 0) const {
    const int64_t within = std::max(sent[0] + more_sent, received[0] + more_received);
    return real(within) / gbs.within + real(std::max(sent[1] + more_away, received[1])) / gbs.between;
  }
};

// The additional bytes that a rank sends and receives within its node.
struct Change {
  int64_t sent, received;
};

struct Block {
  int64_t home, tokens;
  bool free;
  int64_t away = 0, near = 0;  // bytes to other nodes; bytes to all ranks of its node that need it
};

class Homes {
 public:
  Homes(const std::vector<Placement>& placements, Column<const bool> free, Column<const int64_t> tokens,
        Column<const int64_t> caps, int64_t per_node, Links gbs)
      : caps_(caps), per_node_(per_node), gbs_(gbs), near_bytes_(free.size(), per_node) {
    for (int64_t block = 0; block < free.size(); ++block) {
      const int64_t home = placements.front().rank[block];
      blocks_.push_back({home, tokens[block], free[block]});
      used_[home] += tokens[block];
      node_blocks_[home / per_node].push_back(block);
    }
    for (const Placement& placement : placements) add(placement);
    for (int64_t rank = 0; rank < caps.size(); ++rank) time_[rank] = ranks_[rank].time(gbs);
  }

  // Exchanges blocks of the busiest rank for blocks of another rank of its node while that shortens times.
  void exchange() {
    const Array<bool> stuck(time_.size());
    for (int64_t turn = 0; turn < TURNS * count(blocks_); ++turn) {
      int64_t busy = -1;
      for (int64_t rank = 0; rank < caps_.size(); ++rank)
        if (!stuck[rank] && (busy < 0 || time_[rank] > time_[busy])) busy = rank;
      if (busy < 0) return;
      const Pair pair = best(busy);
      if (pair.first < 0) {
        stuck[busy] = true;
        continue;
      }
      const int64_t to = blocks_[pair.second].home;
      swap(pair);
      for (const int64_t rank : {busy, to}) time_[rank] = ranks_[rank].time(gbs_);
      stuck[to] = false;
    }
  }

  // Returns the homes of blocks and the time of each rank.
  std::pair<Array<int64_t>, Array<double>> result() {
    Array<int64_t> home(count(blocks_));
    std::ranges::transform(blocks_, home.begin(), &Block::home);
    return {std::move(home), std::move(time_)};
  }

 private:
  // A block of the busiest rank and one of another rank.
  struct Pair {
    int64_t first = -1, second = -1;
  };

  // Adds traffic: a hyperedge goes from its block's home to all other ranks that it spans. Keys go once to each other
  // node, whose ranks share the received rows.
  void add(const Placement& placement) {
    const Array<int64_t> seen(caps_.size(), -1), entered(count(node_blocks_), -1);
    for (int64_t edge = 0; edge < placement.price.size(); ++edge) {
      const int64_t number = placement.pins[placement.ptr[edge]], home = placement.rank[number], price = placement.price[edge];
      Block& block = blocks_[number];
      for (int64_t at = placement.ptr[edge] + 1; at < placement.ptr[edge + 1]; ++at) {
        const int64_t to = placement.rank[placement.pins[at]];
        if (seen[to] == edge) continue;
        seen[to] = edge;
        const bool leaves = to / per_node_ != home / per_node_;
        if (leaves && edge >= placement.queries && entered[to / per_node_] == edge) continue;
        entered[to / per_node_] = edge;
        (leaves ? block.away : block.near) += price;
        if (!leaves) near_bytes_[number][to % per_node_] += price;
        if (to == home) continue;
        ranks_[home].sent[leaves] += price;
        if (!leaves || edge < placement.queries) {
          ranks_[to].received[leaves] += price;
          continue;
        }
        const int64_t first = to / per_node_ * per_node_;
        for (int64_t rank = first; rank < first + per_node_; ++rank) ranks_[rank].received[1] += price / per_node_;
      }
    }
  }

  // The exchange after which the longer of the two ranks' times is smallest; none if no exchange helps.
  Pair best(int64_t busy) const {
    Pair best;
    double limit = (1 - GAIN) * time_[busy];
    const std::vector<int64_t>& node = node_blocks_[busy / per_node_];
    for (const int64_t first : node) {
      const Block& a = blocks_[first];
      if (a.home != busy || !a.free || a.away + a.near == 0) continue;
      for (const int64_t second : node) {
        const Block& b = blocks_[second];
        const int64_t to = b.home, growth = a.tokens - b.tokens;
        if (to == busy || !b.free || used_[to] + growth > caps_[to] || used_[busy] - growth > caps_[busy]) continue;
        const int64_t away = b.away - a.away;
        const Change here = change(first, second, busy), there = change(second, first, to);
        double longest = ranks_[busy].time(gbs_, here.sent, here.received, away);
        if (longest >= limit) continue;
        longest = std::max(longest, ranks_[to].time(gbs_, there.sent, there.received, -away));
        longest += ADDED_BYTES_WEIGHT * real(std::max<int64_t>(0, here.sent + there.sent)) / gbs_.within;
        if (longest >= limit) continue;
        best = {first, second};
        limit = longest;
      }
    }
    return best;
  }

  // The change for a rank if one block replaces another.
  Change change(int64_t removed, int64_t added, int64_t rank) const {
    const int64_t leaves = near_bytes_[removed][rank % per_node_], enters = near_bytes_[added][rank % per_node_];
    return {(blocks_[added].near - enters) - (blocks_[removed].near - leaves), leaves - enters};
  }

  void move(int64_t removed, int64_t added) {
    const int64_t rank = blocks_[removed].home;
    const Change delta = change(removed, added, rank);
    ranks_[rank].sent[0] += delta.sent;
    ranks_[rank].received[0] += delta.received;
    ranks_[rank].sent[1] += blocks_[added].away - blocks_[removed].away;
    used_[rank] += blocks_[added].tokens - blocks_[removed].tokens;
  }

  void swap(Pair pair) {
    move(pair.first, pair.second);
    move(pair.second, pair.first);
    std::swap(blocks_[pair.first].home, blocks_[pair.second].home);
  }

  Column<const int64_t> caps_;  // tokens of each rank
  int64_t per_node_;
  Links gbs_;
  std::vector<Block> blocks_;
  Array2<int64_t> near_bytes_;  // [blocks, ranks per node]: bytes to each rank of the block's node
  Array<Traffic> ranks_{caps_.size()};
  Array<int64_t> used_{caps_.size()};  // tokens of each rank
  Array<double> time_{caps_.size()};
  Growing<std::vector<int64_t>> node_blocks_ = Growing<std::vector<int64_t>>(caps_.size() / per_node_);
};

// ---- divisions

// The query or key tile of a cell, the rank that holds it, and its bytes, 0 if that is the cell's rank.
struct Need {
  int64_t tile, source, size;
};

struct Cell {
  Need side[2];
};

class Divisions {
 public:
  Divisions(Growing<Cell> cells, int64_t tiles, int64_t ranks, int64_t divisions)
      : cells_(std::move(cells)), last_rank_(tiles, -1), needed_(ranks), spent_(ranks), divisions_(divisions) {}

  // Fills `division` for the cells of a rank, in order.
  void divide(Column<const int32_t> numbers, int64_t rank, Column<int32_t> division) {
    std::fill(needed_.begin(), needed_.end(), 0);
    for (const int32_t cell : numbers) fetch(cells_[cell], rank, needed_);
    for (const int32_t cell : numbers)
      for (const Need& need : cells_[cell].side) last_rank_[need.tile] = -1;
    for (int32_t turn = 1; turn < divisions_; ++turn) {
      std::fill(spent_.begin(), spent_.end(), 0);
      for (const int32_t number : numbers) {
        const Cell& cell = cells_[number];
        const bool is_remote = cell.side[0].size > 0 || cell.side[1].size > 0;
        if (division[number] || !is_remote || (turn < divisions_ - 1 && !fits(cell, rank))) continue;
        division[number] = turn;
        fetch(cell, rank, spent_);
      }
    }
  }

 private:
  int64_t missing(const Need& need, int64_t rank) const { return last_rank_[need.tile] == rank ? 0 : need.size; }

  // Adds the bytes of the cell's tiles that are not yet received to `spent`, by source.
  void fetch(const Cell& cell, int64_t rank, const Array<int64_t>& spent) {
    for (const Need& need : cell.side) {
      spent[need.source] += missing(need, rank);
      last_rank_[need.tile] = rank;
    }
  }

  // True if, with this cell, no source sends the rank more in the division than an equal share of its total.
  bool fits(const Cell& cell, int64_t rank) const {
    const int64_t bytes[2] = {missing(cell.side[0], rank), missing(cell.side[1], rank)};
    const bool same = cell.side[0].source == cell.side[1].source;
    for (int side = 0; side < 2; ++side) {
      const int64_t source = cell.side[side].source, added = same ? bytes[0] + bytes[1] : bytes[side];
      if (added && (spent_[source] + added) * divisions_ > needed_[source]) return false;
    }
    return true;
  }

  Growing<Cell> cells_;
  Array<int64_t> last_rank_;             // the last rank that fetched each tile
  Array<int64_t> needed_, spent_;  // by source
  int64_t divisions_;
};

// Exchanges blocks; returns their homes and the time of each rank.
std::pair<Array<int64_t>, Array<double>> exchange(const std::vector<Placement>& placements, Column<const bool> free,
                                                  Column<const int64_t> tokens, Column<const int64_t> caps,
                                                  int64_t per_node, Links gbs) {
  Homes homes(placements, free, tokens, caps, per_node, gbs);
  homes.exchange();
  return homes.result();
}

// How cells become tiles: numbers of head groups and of sets of KV heads, bytes of a row of queries and of keys.
struct Tiles {
  int64_t groups, key_sets, q_bytes, k_bytes;
};

Array<int32_t> divide(Ints q, Ints k, Ints rank, Column<const int64_t> home, Column<const int64_t> lengths, Tiles tiles,
                      int64_t divisions) {
  int64_t ranks = 1;
  for (int64_t block = 0; block < home.size(); ++block) ranks = std::max(ranks, home[block] + 1);
  for (int64_t cell = 0; cell < rank.size(); ++cell) ranks = std::max(ranks, rank[cell] + 1);
  Growing<Cell> cells;
  for (int64_t cell = 0; cell < rank.size(); ++cell) {
    const int64_t group = cell / q.size(), index = cell % q.size();
    const auto need = [&](int64_t block, int64_t first, int64_t bytes) {
      return Need{first * home.size() + block, home[block], home[block] == rank[cell] ? 0 : lengths[block] * bytes};
    };
    cells.push_back({need(q[index], group, tiles.q_bytes),
                     need(k[index], tiles.groups + group * tiles.key_sets / tiles.groups, tiles.k_bytes)});
  }
  Array<int32_t> order(rank.size()), division(rank.size());
  counting_order<Ints, int32_t>(rank, ranks, order);
  Divisions divider(std::move(cells), (tiles.groups + tiles.key_sets) * home.size(), ranks, divisions);
  for (int64_t begin = 0, end = 0; begin < rank.size(); begin = end) {
    const int64_t current = rank[order[begin]];
    while (end < rank.size() && rank[order[end]] == current) ++end;
    divider.divide(order.slice(begin, end), current, division);
  }
  return division;
}

}  // namespace

static const Area area("dcp", [](nb::module_& m) {
  def(m, "exchange(placed, free, tokens, caps, per_node, gbs)", exchange);
  def(m, "divide(q, k, rank, home, lengths, tiles, divisions)", divide);
});

}  // namespace apportion
