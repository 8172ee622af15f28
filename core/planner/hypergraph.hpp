// Hypergraphs whose hyperedges may be cut.
#pragma once

#include <vector>

#include "planner/scratch.hpp"

namespace apportion {

// `Graph` of apportion/planner/solvers/hypergraph/graph.py: the vertices of each hyperedge as CSR, the hyperedges of
// each vertex, and their prices.
struct Graph {
  Column<const std::int64_t> ptr, pins, of_ptr, of, price;

  std::int64_t edges() const { return price.size(); }
  Column<const std::int64_t> vertices_of(std::int64_t edge) const { return pins.slice(ptr[edge], ptr[edge + 1]); }
  Column<const std::int64_t> edges_of(std::int64_t v) const { return of.slice(of_ptr[v], of_ptr[v + 1]); }
};

// The least vertex that hangs together with each; only free vertices of one base do.
template <class IsFree>
void components(Column<const std::int64_t> ptr, Column<const std::int64_t> pins, Column<const std::int64_t> base,
                IsFree&& is_free, Column<std::int64_t> root) {
  for (std::int64_t v = 0; v < root.size(); ++v) root[v] = v;
  const auto top = [&root](std::int64_t v) {
    while (root[v] != v) v = root[v] = root[root[v]];
    return v;
  };
  for (std::int64_t edge = 0; edge + 1 < ptr.size(); ++edge) {
    std::int64_t last = -1;
    for (const std::int64_t pin : pins.slice(ptr[edge], ptr[edge + 1])) {
      if (!is_free(pin)) continue;
      std::int64_t v = top(pin);
      if (last >= 0 && base[last] == base[v] && last != v) {
        root[std::max(last, v)] = std::min(last, v);
        v = std::min(last, v);
      }
      last = v;
    }
  }
  for (std::int64_t v = 0; v < root.size(); ++v) root[v] = top(v);
}

// Weights of vertices that are to have parts in [base, base + span), and what each part may have at most.
struct Movable {
  Column<const std::int64_t> base;
  Column<const bool> movable;
  Column<const std::int64_t> flops, cap;
  std::int64_t span;
};

// Gives parts to those without (-1) that are movable, and moves others of these; thorough: groups of vertices, too.
void spread(const Graph& graph, const Movable& given, bool thorough, Column<std::int64_t> part);
// Moves what gains, where no part is above its cap.
void polish(const Graph& graph, const Movable& given, Column<std::int64_t> part);

// Two weights of vertices, all of which have a rank, and what ranks and nodes of `per_node` may have at most. far: what
// one more node costs beside one more rank.
struct Both {
  Column<const bool> movable;
  Column<const std::int64_t> flops, tokens, flops_cap, tokens_cap, node_flops_cap, node_tokens_cap;
  std::int64_t per_node, far;
};

// Moves homes and compute where that gains and the caps allow it.
void refine_together(const Graph& graph, const Both& given, Column<std::int64_t> part);

// The cluster of each vertex, by its dearest hyperedge that has one; -1: none. of: that of those that are in one.
Scratch<std::int64_t> anchors(Column<const std::int64_t> ptr, Column<const std::int64_t> pins,
                              Column<const std::int64_t> price, Column<const std::int64_t> of);

// Clusters of a vertex with tokens each and those without that are tied to it, with hyperedges of several clusters.
struct Clusters {
  std::vector<std::int64_t> ptr{0}, pins, price, flops;
};

// of: the cluster of each vertex with tokens, -1 of others.
Clusters clusters(Column<const std::int64_t> ptr, Column<const std::int64_t> pins, Column<const std::int64_t> price,
                  Column<const std::int64_t> flops, Column<const std::int64_t> of, std::int64_t count);

// Two weights of clusters that are to have parts in [base, base + span), and what each part may have at most.
struct Homeless {
  Column<const std::int64_t> flops, tokens, base, flops_cap, tokens_cap;
  std::int64_t span;
};

// Gives a part to clusters at -1, or leaves them there where none has room. rate: what flops above a cap cost.
void place(const Graph& graph, const Homeless& given, double rate, Column<std::int64_t> part);

}  // namespace apportion
