#include "planner/hypergraph.hpp"

#include "bind.hpp"

namespace apportion {

using std::int64_t;

namespace {

using Numbers = Column<const int64_t>;

// The hyperedges of each vertex, as CSR.
void invert(Numbers ptr, Numbers pins, Column<int64_t> of_ptr, Column<int64_t> of) {
  std::fill(of_ptr.begin(), of_ptr.end(), 0);
  for (const int64_t v : pins) ++of_ptr[v + 1];
  for (int64_t v = 0; v + 1 < of_ptr.size(); ++v) of_ptr[v + 1] += of_ptr[v];
  Scratch<int64_t> place = Scratch<int64_t>::of(of_ptr);
  for (int64_t edge = 0; edge + 1 < ptr.size(); ++edge)
    for (const int64_t v : pins.slice(ptr[edge], ptr[edge + 1])) of[place[v]++] = edge;
}

// The parts that each hyperedge has vertices in.
void count_parts(Numbers ptr, Numbers pins, Numbers part, int64_t parts, Column<int64_t> found) {
  Scratch<int64_t> seen(parts, -1);
  for (int64_t edge = 0; edge < found.size(); ++edge) {
    found[edge] = 0;
    for (const int64_t v : pins.slice(ptr[edge], ptr[edge + 1])) {
      const int64_t p = part[v];
      if (p < 0 || seen[p] == edge) continue;
      seen[p] = edge;
      ++found[edge];
    }
  }
}

Graph graph_of(Fields& of) {
  return {of.next<Numbers>("ptr"), of.next<Numbers>("pins"), of.next<Numbers>("of_ptr"), of.next<Numbers>("of"),
          of.next<Numbers>("price")};
}

template <class Move>
nb::object moved(nb::tuple graph, Numbers part, Move&& move) {
  Fields of(graph);
  const Graph edges = graph_of(of);
  New<int64_t> found(part.size());
  unlocked([&] {
    std::copy(part.begin(), part.end(), found.begin());
    move(edges, found);
  });
  return found.array();
}

}  // namespace

void bind_hypergraph(nb::module_& m) {
  m.def("incidence", [](In<int64_t, "ptr"> ptr, In<int64_t, "pins"> pins, int64_t vertices) {
    New<int64_t> of_ptr(vertices + 1), of(pins.size());
    unlocked([&] { invert(ptr, pins, of_ptr, of); });
    return nb::make_tuple(of_ptr.array(), of.array());
  });
  m.def("components", [](In<int64_t, "ptr"> ptr, In<int64_t, "pins"> pins, In<int64_t, "base"> base) {
    New<int64_t> root(base.size());
    unlocked([&] { components(ptr, pins, base, [](int64_t) { return true; }, root); });
    return root.array();
  });
  m.def("spans", [](In<int64_t, "ptr"> ptr, In<int64_t, "pins"> pins, In<int64_t, "part"> part, int64_t parts) {
    New<int64_t> found(ptr.size() - 1);
    unlocked([&] { count_parts(ptr, pins, part, parts, found); });
    return found.array();
  });

  m.def("spread", [](nb::tuple graph, In<int64_t, "part"> part, In<int64_t, "base"> base, In<bool, "movable"> movable,
                     In<int64_t, "flops"> flops, In<int64_t, "cap"> cap, int64_t span, bool thorough) {
    return moved(graph, part, [&](const Graph& edges, Column<int64_t> found) {
      spread(edges, {base, movable, flops, cap, span}, thorough, found);
    });
  });
  m.def("polish", [](nb::tuple graph, In<int64_t, "part"> part, In<int64_t, "base"> base, In<bool, "movable"> movable,
                     In<int64_t, "flops"> flops, In<int64_t, "cap"> cap, int64_t span) {
    return moved(graph, part, [&](const Graph& edges, Column<int64_t> found) {
      polish(edges, {base, movable, flops, cap, span}, found);
    });
  });

  m.def("refine_together", [](nb::tuple graph, In<int64_t, "part"> part, In<bool, "movable"> movable,
                              In<int64_t, "flops"> flops, In<int64_t, "tokens"> tokens,
                              In<int64_t, "flops_cap"> flops_cap, In<int64_t, "tokens_cap"> tokens_cap,
                              In<int64_t, "node_flops_cap"> node_flops_cap,
                              In<int64_t, "node_tokens_cap"> node_tokens_cap, int64_t per_node, int64_t far) {
    return moved(graph, part, [&](const Graph& edges, Column<int64_t> found) {
      refine_together(
          edges, {movable, flops, tokens, flops_cap, tokens_cap, node_flops_cap, node_tokens_cap, per_node, far}, found);
    });
  });

  m.def("clusters", [](In<int64_t, "ptr"> ptr, In<int64_t, "pins"> pins, In<int64_t, "price"> price,
                       In<int64_t, "flops"> flops, In<int64_t, "of"> of, int64_t count) {
    Clusters found = unlocked([&] { return clusters(ptr, pins, price, flops, of, count); });
    return nb::make_tuple(handed(std::move(found.flops)), handed(std::move(found.ptr)), handed(std::move(found.pins)),
                          handed(std::move(found.price)));
  });
  m.def("place", [](nb::tuple graph, In<int64_t, "part"> part, In<int64_t, "base"> base, In<int64_t, "flops"> flops,
                    In<int64_t, "tokens"> tokens, In<int64_t, "flops_cap"> flops_cap,
                    In<int64_t, "tokens_cap"> tokens_cap, int64_t span, double rate) {
    return moved(graph, part, [&](const Graph& edges, Column<int64_t> found) {
      place(edges, {flops, tokens, base, flops_cap, tokens_cap, span}, rate, found);
    });
  });
}

}  // namespace apportion
