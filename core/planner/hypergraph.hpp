// Hypergraphs whose hyperedges may be cut.
#pragma once

#include "owned.hpp"

namespace apportion {

// The vertices of each hyperedge, as CSR, and its price.
struct Hyperedges {
  Column<const int64_t> ptr, pins, price;

  int64_t count() const { return price.size(); }
  Column<const int64_t> vertices_of(int64_t edge) const { return pins.slice(ptr[edge], ptr[edge + 1]); }
};

// `Graph` of apportion/planner/solvers/hypergraph/graph.py: hyperedges, and the hyperedges of each vertex.
struct Graph {
  Column<const int64_t> ptr, pins, price, incident_ptr, incident;

  Hyperedges all() const { return {ptr, pins, price}; }
  int64_t edges() const { return price.size(); }
  Column<const int64_t> vertices_of(int64_t edge) const { return pins.slice(ptr[edge], ptr[edge + 1]); }
  Column<const int64_t> edges_of(int64_t v) const { return incident.slice(incident_ptr[v], incident_ptr[v + 1]); }
};

// For each vertex, the lowest vertex of its connected component; only free vertices with the same base are connected.
template <class IsFree>
Array<int64_t> components(const Hyperedges& edges, Column<const int64_t> base, IsFree&& is_free) {
  Array<int64_t> root(base.size());
  for (int64_t v = 0; v < root.size(); ++v) root[v] = v;
  const auto top = [&root](int64_t v) {
    while (root[v] != v) v = root[v] = root[root[v]];
    return v;
  };
  for (int64_t edge = 0; edge < edges.count(); ++edge) {
    int64_t last = -1;
    for (const int64_t pin : edges.vertices_of(edge)) {
      if (!is_free(pin)) continue;
      int64_t v = top(pin);
      if (last >= 0 && base[last] == base[v] && last != v) {
        root[std::max(last, v)] = std::min(last, v);
        v = std::min(last, v);
      }
      last = v;
    }
  }
  for (int64_t v = 0; v < root.size(); ++v) root[v] = top(v);
  return root;
}

// FLOPs of vertices, which are assigned to parts in [base, base + span), and the cap of each part.
struct Movable {
  Column<const int64_t> base;
  Column<const bool> movable;
  Column<const int64_t> flops, cap;
  int64_t span;
};

// The parts of vertices: assigns movable vertices without a part (-1) and may move other movable ones. thorough:
// whether to move groups of vertices as well.
Array<int64_t> spread(const Graph& graph, Column<const int64_t> part, const Movable& input, bool thorough);
// The parts of vertices after moves that improve them, if no part is above its cap.
Array<int64_t> polish(const Graph& graph, Column<const int64_t> part, const Movable& input);

// FLOPs and tokens of vertices, which all have a rank, and the caps of ranks and of nodes of `per_node` ranks. far: the
// cost of an additional node relative to an additional rank.
struct JointInput {
  Column<const bool> movable;
  Column<const int64_t> flops, tokens, flops_cap, tokens_cap, node_flops_cap, node_tokens_cap;
  int64_t per_node, far;
};

// The ranks of vertices after moves of homes and compute that improve them within the caps.
Array<int64_t> refine_together(const Graph& graph, Column<const int64_t> part, const JointInput& input);

// The cluster of each vertex: from `cluster`, else that of its most expensive hyperedge with a cluster; -1: none.
Array<int64_t> anchors(const Hyperedges& edges, Column<const int64_t> cluster);

// Clusters of a vertex with tokens and the tokenless vertices anchored to it, and the hyperedges that span several.
struct Clusters {
  Growing<int64_t> flops, ptr{0}, pins, price;

  auto fields() { return moved(flops, ptr, pins, price); }
};

// cluster: that of each vertex with tokens; -1 for other vertices.
Clusters clusters(const Hyperedges& edges, Column<const int64_t> flops, Column<const int64_t> cluster, int64_t count);

// FLOPs and tokens of clusters, which are assigned to parts in [base, base + span), and the caps of each part.
struct ClusterInput {
  Column<const int64_t> flops, tokens, base, flops_cap, tokens_cap;
  int64_t span;
};

// The parts of clusters; assigns those at -1 if there is room. rate: the cost per FLOP above a cap.
Array<int64_t> place(const Graph& graph, Column<const int64_t> part, const ClusterInput& input, double rate);

}  // namespace apportion
