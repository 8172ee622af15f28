// Refines homes and compute together: vertices with and without tokens change ranks if this lowers the cost and keeps
// both weights within the caps of nodes and ranks.
//
//   cluster   a vertex with tokens, and the vertices without tokens on its rank that are anchored to it
//   cells     single vertices without tokens, which move
//   homes     clusters, or single vertices with tokens, which swap ranks or move if there is room
#include "planner/hypergraph.hpp"
#include "planner/numbers.hpp"

namespace apportion {

namespace {

constexpr int PASSES = 4;
// Limit on the pins that all moves of homes change, at a few nanoseconds each.
constexpr int64_t MAX_STEPS = 2'000'000;

class Joint {
 public:
  Joint(const Graph& graph, const JointInput& input, Column<int64_t> part) : graph_(graph), input_(input), part_(part) {
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
  int64_t node_of(int64_t rank) const { return rank / input_.per_node; }
  bool is_cell(int64_t v) const { return input_.movable[v] && input_.tokens[v] == 0; }

  void enter(int64_t v, int64_t p) {
    part_[v] = p;
    count_weights(v, p, 1);
    for (const int64_t edge : graph_.edges_of(v)) {
      if (on_rank_[edge][p]++ == 0) value_ += graph_.price[edge];
      if (on_node_[edge][node_of(p)]++ == 0) value_ += input_.far * graph_.price[edge];
    }
    steps_ += graph_.edges_of(v).size();
  }

  void leave(int64_t v) {
    const int64_t p = part_[v];
    count_weights(v, p, -1);
    for (const int64_t edge : graph_.edges_of(v)) {
      if (--on_rank_[edge][p] == 0) value_ -= graph_.price[edge];
      if (--on_node_[edge][node_of(p)] == 0) value_ -= input_.far * graph_.price[edge];
    }
  }

  void count_weights(int64_t v, int64_t p, int64_t sign) {
    flops_[p] += sign * input_.flops[v];
    tokens_[p] += sign * input_.tokens[v];
    node_flops_[node_of(p)] += sign * input_.flops[v];
    node_tokens_[node_of(p)] += sign * input_.tokens[v];
  }

  void move(int64_t v, int64_t p) {
    leave(v);
    enter(v, p);
  }

  // Whether rank p has room for these weights, and so has its node if they come from another node.
  bool has_room(int64_t p, int64_t from, int64_t flops, int64_t tokens) const {
    const int64_t node = node_of(p);
    if (flops_[p] + flops > input_.flops_cap[p] || tokens_[p] + tokens > input_.tokens_cap[p]) return false;
    if (node == node_of(from)) return true;
    return node_flops_[node] + flops <= input_.node_flops_cap[node] &&
           node_tokens_[node] + tokens <= input_.node_tokens_cap[node];
  }

  void find_followers() {
    Array<int64_t> base(part_.size(), -1);
    for (int64_t v = 0; v < part_.size(); ++v)
      if (input_.tokens[v] > 0) base[v] = v;
    const Array<int64_t> anchor = anchors(graph_.all(), base);
    for (int64_t v = 0; v < part_.size(); ++v)
      if (is_cell(v) && anchor[v] >= 0) followers_[anchor[v]].push_back(v);
  }

  bool move_cells() {
    bool moved = false;
    for (int64_t v = 0; v < part_.size(); ++v) {
      if (!is_cell(v)) continue;
      const int64_t from = part_[v];
      leave(v);
      int64_t best = from, min_cost = cost_of(v, from);
      for (int64_t p = 0; p < ranks_ && min_cost > 0; ++p) {
        if (p == from || !touches(v, p) || !takes(p, input_.flops[v])) continue;
        const int64_t cost = cost_of(v, p);
        if (cost >= min_cost) continue;
        best = p;
        min_cost = cost;
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
    return flops_[p] + flops <= input_.flops_cap[p] &&
           node_flops_[node_of(p)] + flops <= input_.node_flops_cap[node_of(p)];
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
      if (!on_node_[edge][node_of(p)]) cost += input_.far * graph_.price[edge];
    }
    return cost;
  }

  // A vertex with tokens and the vertices that move with it. gains: what a move to each rank saves, all else unchanged.
  struct Cluster {
    Growing<int64_t> members, gains;
    int64_t flops = 0, tokens = 0, rank = -1, version = -1;
  };

  // Finds the cluster of v, unless `cluster` already has the current `version` of the placement.
  void find(int64_t v, bool whole, Cluster& cluster) {
    if (cluster.version == version_) return;
    cluster = {{v}, Growing<int64_t>(ranks_), input_.flops[v], input_.tokens[v], part_[v], version_};
    if (whole)
      for (const int64_t cell : followers_[v]) {
        if (part_[cell] != part_[v]) continue;
        cluster.members.push_back(cell);
        cluster.flops += input_.flops[cell];
      }
    std::vector<int64_t> edges;
    for (const int64_t member : cluster.members)
      for (const int64_t edge : graph_.edges_of(member))
        if (inside_[edge]++ == 0) edges.push_back(edge);
    const int64_t home = node_of(cluster.rank);
    for (const int64_t edge : edges) {
      const int64_t price = graph_.price[edge], far_price = input_.far * price;
      const bool leaves = on_rank_[edge][cluster.rank] == inside_[edge], leaves_node = on_node_[edge][home] == inside_[edge];
      for (int64_t p = 0; p < ranks_; ++p) {
        int64_t& gain = cluster.gains[p];
        gain += (leaves ? price : 0) - (on_rank_[edge][p] ? 0 : price);
        if (node_of(p) != home) gain += (leaves_node ? far_price : 0) - (on_node_[edge][node_of(p)] ? 0 : far_price);
      }
      inside_[edge] = 0;
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
      if (input_.movable[v] && input_.tokens[v] > 0) homes.push_back(v);
    for (const bool whole : {true, false}) {
      std::vector<Cluster> clusters(homes.size());
      for (std::size_t i = 0; i < homes.size(); ++i) {
        for (std::size_t j = i + 1; j < homes.size(); ++j) {
          if (steps_ > MAX_STEPS) return version_ != before;
          if (part_[homes[i]] == part_[homes[j]] || !takes_tokens(homes[i], homes[j])) continue;
          find(homes[i], whole, clusters[i]);
          find(homes[j], whole, clusters[j]);
          exchange(clusters[i], clusters[j]);
        }
        for (int64_t p = 0; p < ranks_; ++p) {
          find(homes[i], whole, clusters[i]);
          shift(clusters[i], p);
        }
      }
    }
    return version_ != before;
  }

  // Whether the ranks of two vertices have room to swap their tokens.
  bool takes_tokens(int64_t v, int64_t w) const {
    const int64_t more = input_.tokens[w] - input_.tokens[v];
    return has_room(part_[v], part_[w], 0, more) && has_room(part_[w], part_[v], 0, -more);
  }

  // Swaps two clusters if this lowers the cost, which it does by at most the sum of their separate gains.
  void exchange(const Cluster& a, const Cluster& b) {
    const int64_t p = a.rank, q = b.rank, flops = b.flops - a.flops, tokens = b.tokens - a.tokens;
    if (a.gains[q] + b.gains[p] <= 0) return;
    if (!has_room(p, q, flops, tokens) || !has_room(q, p, -flops, -tokens)) return;
    const int64_t before = value_;
    put(a, q);
    put(b, p);
    if (value_ < before) {
      ++version_;
      return;
    }
    put(b, q);
    put(a, p);
  }

  void shift(const Cluster& cluster, int64_t p) {
    if (p == cluster.rank || cluster.gains[p] <= 0 || !has_room(p, cluster.rank, cluster.flops, cluster.tokens)) return;
    put(cluster, p);
    ++version_;
  }

  const Graph graph_;
  const JointInput input_;
  Column<int64_t> part_;
  const int64_t ranks_ = input_.flops_cap.size(), nodes_ = ranks_ / input_.per_node;
  Array2<int32_t> on_rank_{graph_.edges(), ranks_}, on_node_{graph_.edges(), nodes_};  // pins of each hyperedge
  Array<int64_t> flops_{ranks_}, tokens_{ranks_}, node_flops_{nodes_}, node_tokens_{nodes_};
  Growing<std::vector<int64_t>> followers_ = Growing<std::vector<int64_t>>(part_.size());  // of each vertex with tokens
  Array<int64_t> inside_{graph_.edges()};                         // how many pins of each hyperedge a cluster has
  int64_t value_ = 0, steps_ = 0, version_ = 0;
};

}  // namespace

Array<int64_t> refine_together(const Graph& graph, Column<const int64_t> part, const JointInput& input) {
  Array<int64_t> result = Array<int64_t>::of(part);
  Joint(graph, input, result).run();
  return result;
}

}  // namespace apportion
