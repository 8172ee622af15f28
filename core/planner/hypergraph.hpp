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

// The least vertex of each connected component; only free vertices of one base are connected.
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

// Weights of vertices to assign to parts in [base, base + span), and the limit of each part.
struct Movable {
  Column<const std::int64_t> base;
  Column<const bool> movable;
  Column<const std::int64_t> flops, cap;
  std::int64_t span;
};

// Assigns parts to movable vertices without one (-1), and moves others of these; thorough: also groups of vertices.
void spread(const Graph& graph, const Movable& given, bool thorough, Column<std::int64_t> part);
// Makes improving moves, if no part is above its cap.
void polish(const Graph& graph, const Movable& given, Column<std::int64_t> part);

// Two weights of vertices, all with a rank, and limits of ranks and nodes of `per_node`. far: cost of one more node
// relative to one more rank.
struct Both {
  Column<const bool> movable;
  Column<const std::int64_t> flops, tokens, flops_cap, tokens_cap, node_flops_cap, node_tokens_cap;
  std::int64_t per_node, far;
};

// Makes improving moves of homes and compute within the caps.
void refine_together(const Graph& graph, const Both& given, Column<std::int64_t> part);

// The cluster of each vertex, by its most expensive hyperedge with one; -1: none. of: the given clusters.
Scratch<std::int64_t> anchors(Column<const std::int64_t> ptr, Column<const std::int64_t> pins,
                              Column<const std::int64_t> price, Column<const std::int64_t> of);

// Clusters of a vertex with tokens and its connected vertices without, with hyperedges of several clusters.
struct Clusters {
  std::vector<std::int64_t> ptr{0}, pins, price, flops;
};

// of: the cluster of each vertex with tokens, -1 for others.
Clusters clusters(Column<const std::int64_t> ptr, Column<const std::int64_t> pins, Column<const std::int64_t> price,
                  Column<const std::int64_t> flops, Column<const std::int64_t> of, std::int64_t count);

// Two weights of clusters to assign to parts in [base, base + span), and the limits of each part.
struct Homeless {
  Column<const std::int64_t> flops, tokens, base, flops_cap, tokens_cap;
  std::int64_t span;
};

// Assigns parts to clusters at -1, or leaves them there without room. rate: cost of flops above a cap.
void place(const Graph& graph, const Homeless& given, double rate, Column<std::int64_t> part);

}  // namespace apportion
