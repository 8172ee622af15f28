#include "planner/hypergraph.hpp"

#include "bind.hpp"

namespace apportion {

namespace {

using Numbers = Column<const int64_t>;

// The hyperedges of each vertex, as CSR.
std::pair<Array<int64_t>, Array<int64_t>> incidence(const Hyperedges& edges, int64_t vertices) {
  Array<int64_t> ptr(vertices + 1), incident(edges.pins.size());
  for (const int64_t v : edges.pins) ++ptr[v + 1];
  for (int64_t v = 0; v < vertices; ++v) ptr[v + 1] += ptr[v];
  const Array<int64_t> place = Array<int64_t>::of(ptr);
  for (int64_t edge = 0; edge < edges.count(); ++edge)
    for (const int64_t v : edges.vertices_of(edge)) incident[place[v]++] = edge;
  return {std::move(ptr), std::move(incident)};
}

// The number of parts in which each hyperedge has vertices.
Array<int64_t> spans(const Hyperedges& edges, Numbers part, int64_t parts) {
  Array<int64_t> counts(edges.count()), seen(parts, -1);
  for (int64_t edge = 0; edge < counts.size(); ++edge) {
    for (const int64_t v : edges.vertices_of(edge)) {
      const int64_t p = part[v];
      if (p < 0 || seen[p] == edge) continue;
      seen[p] = edge;
      ++counts[edge];
    }
  }
  return counts;
}

}  // namespace

static const Area area("hypergraph", [](nb::module_& m) {
  def(m, "incidence(edges, vertices)", incidence);
  def(m, "components(edges, base)", +[](const Hyperedges& edges, Numbers base) {
    return components(edges, base, [](int64_t) { return true; });
  });
  def(m, "spans(edges, part, parts)", spans);
  def(m, "spread(graph, part, movable, thorough)", spread);
  def(m, "polish(graph, part, movable)", polish);
  def(m, "refine_together(graph, part, both)", refine_together);
  def(m, "clusters(edges, flops, of, count)", clusters);
  def(m, "place(graph, part, homeless, rate)", place);
});

}  // namespace apportion
