// Refines homes and compute together: vertices with and without tokens change ranks if this lowers the cost and keeps
// both weights within the caps of nodes and ranks.
//
//   cluster   a vertex with tokens, and the vertices without tokens on its rank that are anchored to it
//   cells     single vertices without tokens, which move
//   homes     clusters, or single vertices with tokens, which swap ranks or move if there is room
#include "planner/hypergraph.hpp"
#include "planner/numbers.hpp"

namespace apportion {

using std::int64_t;

namespace {

constexpr int PASSES = 4;
// Limit on the pins that all moves of homes change, at a few nanoseconds each.
constexpr int64_t MOST_STEPS = 2'000'000;

class Joint {
 public:
  Joint(const Graph& graph, const Both& given, Column<int64_t> part)
      : graph_(graph),
        given_(given),
        part_(part),
        ranks_(given.flops_cap.size()),
        on_rank_(graph.edges(), ranks_),
        on_node_(graph.edges(), ranks_ / given.per_node),
        flops_(ranks_),
        tokens_(ranks_),
        node_flops_(ranks_ / given.per_node),
        node_tokens_(ranks_ / given.per_node),
        own_(graph.edges()) {
    for (int64_t v = 0; v < part.size(); ++v) enter(v, part[v]);
    find_followers();
  }

  void run() {
    for (int pass = 0; pass < PASSES; ++pass) {
      const bool cells = move_cells();
      if (!move_homes() && !cells) return;
    }
  }

 private:
  int64_t node_of(int64_t rank) const { return rank / given_.per_node; }
  bool is_cell(int64_t v) const { return given_.movable[v] && given_.tokens[v] == 0; }

  void enter(int64_t v, int64_t p) {
    part_[v] = p;
    count_weights(v, p, 1);
    for (const int64_t edge : graph_.edges_of(v)) {
      if (on_rank_[edge][p]++ == 0) value_ += graph_.price[edge];
      if (on_node_[edge][node_of(p)]++ == 0) value_ += given_.far * graph_.price[edge];
    }
    steps_ += graph_.edges_of(v).size();
  }

  void leave(int64_t v) {
    const int64_t p = part_[v];
    count_weights(v, p, -1);
    for (const int64_t edge : graph_.edges_of(v)) {
      if (--on_rank_[edge][p] == 0) value_ -= graph_.price[edge];
      if (--on_node_[edge][node_of(p)] == 0) value_ -= given_.far * graph_.price[edge];
    }
  }

  void count_weights(int64_t v, int64_t p, int64_t sign) {
    flops_[p] += sign * given_.flops[v];
    tokens_[p] += sign * given_.tokens[v];
    node_flops_[node_of(p)] += sign * given_.flops[v];
    node_tokens_[node_of(p)] += sign * given_.tokens[v];
  }

  void move(int64_t v, int64_t p) {
    leave(v);
    enter(v, p);
  }

  // Whether rank p, and its node if the weights come from another node, has room for them.
  bool has_room(int64_t p, int64_t from, int64_t flops, int64_t tokens) const {
    const int64_t node = node_of(p);
    if (flops_[p] + flops > given_.flops_cap[p] || tokens_[p] + tokens > given_.tokens_cap[p]) return false;
    if (node == node_of(from)) return true;
    return node_flops_[node] + flops <= given_.node_flops_cap[node] &&
           node_tokens_[node] + tokens <= given_.node_tokens_cap[node];
  }

  void find_followers() {
    Array<int64_t> own(part_.size(), -1);
    for (int64_t v = 0; v < part_.size(); ++v)
      if (given_.tokens[v] > 0) own[v] = v;
    const Array<int64_t> anchor = anchors(graph_.all(), own);
    followers_.resize(static_cast<std::size_t>(part_.size()));
    for (int64_t v = 0; v < part_.size(); ++v)
      if (is_cell(v) && anchor[v] >= 0) followers_[static_cast<std::size_t>(anchor[v])].push_back(v);
  }

  bool move_cells() {
    bool moved = false;
    for (int64_t v = 0; v < part_.size(); ++v) {
      if (!is_cell(v)) continue;
      const int64_t from = part_[v];
      leave(v);
      int64_t best = from, least = cost_of(v, from);
      for (int64_t p = 0; p < ranks_ && least > 0; ++p) {
        if (p == from || !touches(v, p) || !takes(p, given_.flops[v])) continue;
        const int64_t cost = cost_of(v, p);
        if (cost >= least) continue;
        best = p;
        least = cost;
      }
      enter(v, best);
      if (best == from) continue;
      ++version_;
      moved = true;
    }
    return moved;
  }

  // Whether rank p and its node have room for a vertex that has left its rank.
  bool takes(int64_t p, int64_t flops) const {
    return flops_[p] + flops <= given_.flops_cap[p] &&
           node_flops_[node_of(p)] + flops <= given_.node_flops_cap[node_of(p)];
  }

  bool touches(int64_t v, int64_t p) const {
    for (const int64_t edge : graph_.edges_of(v))
      if (on_rank_[edge][p]) return true;
    return false;
  }

  // The increase in the cost of v's hyperedges if v is put on p.
  int64_t cost_of(int64_t v, int64_t p) const {
    int64_t cost = 0;
    for (const int64_t edge : graph_.edges_of(v)) {
      if (!on_rank_[edge][p]) cost += graph_.price[edge];
      if (!on_node_[edge][node_of(p)]) cost += given_.far * graph_.price[edge];
    }
    return cost;
  }

  // A vertex with tokens and the vertices that move with it. gains: what a move to each rank saves, all else unchanged.
  struct Cluster {
    std::vector<int64_t> members, gains;
    int64_t flops = 0, tokens = 0, at = -1, version = -1;
  };

  // Finds the cluster of v. It stays valid while its `version`, that of the placement, is current.
  void find(int64_t v, bool whole, Cluster& found) {
    if (found.version == version_) return;
    found = {{v}, std::vector<int64_t>(static_cast<std::size_t>(ranks_)), given_.flops[v], given_.tokens[v], part_[v],
             version_};
    if (whole)
      for (const int64_t cell : followers_[static_cast<std::size_t>(v)]) {
        if (part_[cell] != part_[v]) continue;
        found.members.push_back(cell);
        found.flops += given_.flops[cell];
      }
    std::vector<int64_t> edges;
    for (const int64_t member : found.members)
      for (const int64_t edge : graph_.edges_of(member))
        if (own_[edge]++ == 0) edges.push_back(edge);
    const int64_t home = node_of(found.at);
    for (const int64_t edge : edges) {
      const int64_t price = graph_.price[edge], dear = given_.far * price;
      const bool leaves = on_rank_[edge][found.at] == own_[edge], leaves_node = on_node_[edge][home] == own_[edge];
      for (int64_t p = 0; p < ranks_; ++p) {
        int64_t& gain = found.gains[static_cast<std::size_t>(p)];
        gain += (leaves ? price : 0) - (on_rank_[edge][p] ? 0 : price);
        if (node_of(p) != home) gain += (leaves_node ? dear : 0) - (on_node_[edge][node_of(p)] ? 0 : dear);
      }
      own_[edge] = 0;
    }
    steps_ += ranks_ * count(edges);
  }

  void put(const Cluster& cluster, int64_t p) {
    for (const int64_t v : cluster.members) move(v, p);
  }

  bool move_homes() {
    const int64_t before = version_;
    std::vector<int64_t> homes;
    for (int64_t v = 0; v < part_.size(); ++v)
      if (given_.movable[v] && given_.tokens[v] > 0) homes.push_back(v);
    for (const bool whole : {true, false}) {
      std::vector<Cluster> clusters(homes.size());
      for (std::size_t one = 0; one < homes.size(); ++one) {
        for (std::size_t other = one + 1; other < homes.size(); ++other) {
          if (steps_ > MOST_STEPS) return version_ != before;
          if (part_[homes[one]] == part_[homes[other]] || !takes_tokens(homes[one], homes[other])) continue;
          find(homes[one], whole, clusters[one]);
          find(homes[other], whole, clusters[other]);
          exchange(clusters[one], clusters[other]);
        }
        for (int64_t p = 0; p < ranks_; ++p) {
          find(homes[one], whole, clusters[one]);
          shift(clusters[one], p);
        }
      }
    }
    return version_ != before;
  }

  // Whether the ranks of two vertices have room to swap their tokens.
  bool takes_tokens(int64_t v, int64_t w) const {
    const int64_t more = given_.tokens[w] - given_.tokens[v];
    return has_room(part_[v], part_[w], 0, more) && has_room(part_[w], part_[v], 0, -more);
  }

  // Swaps two clusters if this lowers the cost. It can lower it by at most the sum of their separate gains.
  void exchange(const Cluster& one, const Cluster& other) {
    const int64_t p = one.at, q = other.at, flops = other.flops - one.flops, tokens = other.tokens - one.tokens;
    if (gain(one, q) + gain(other, p) <= 0) return;
    if (!has_room(p, q, flops, tokens) || !has_room(q, p, -flops, -tokens)) return;
    const int64_t before = value_;
    put(one, q);
    put(other, p);
    if (value_ < before) {
      ++version_;
      return;
    }
    put(other, q);
    put(one, p);
  }

  void shift(const Cluster& one, int64_t p) {
    if (p == one.at || gain(one, p) <= 0 || !has_room(p, one.at, one.flops, one.tokens)) return;
    put(one, p);
    ++version_;
  }

  static int64_t gain(const Cluster& one, int64_t p) { return one.gains[static_cast<std::size_t>(p)]; }

  const Graph graph_;
  const Both given_;
  Column<int64_t> part_;
  const int64_t ranks_;
  Array2<std::int32_t> on_rank_, on_node_;  // pins of each hyperedge on each rank and node
  Array<int64_t> flops_, tokens_, node_flops_, node_tokens_;
  std::vector<std::vector<int64_t>> followers_;  // of each vertex with tokens
  Array<int64_t> own_;                         // how many pins of each hyperedge a cluster has
  int64_t value_ = 0, steps_ = 0, version_ = 0;
};

}  // namespace

Array<int64_t> refine_together(const Graph& graph, Column<const int64_t> part, const Both& given) {
  Array<int64_t> found = Array<int64_t>::of(part);
  Joint(graph, given, found).run();
  return found;
}

}  // namespace apportion
