// Edge colouring of a bipartite multigraph in max-degree colours (König):
// apportion/planner/solvers/colouring/matching.py.

#include "bind.hpp"
#include "planner/matching.hpp"

namespace apportion {

namespace {

constexpr int64_t BITS = 64;  // colours per word

struct Edge {
  int64_t sender, receiver;  // vertices: senders 0 … ranks - 1, then receivers

  int64_t other(int64_t end) const { return end == sender ? receiver : sender; }
};

// The edge of each colour at each vertex, and one bit per free colour. The words of a vertex before its `lowest_` are
// zero.
class Colours {
 public:
  Colours(int64_t vertices, int64_t colours)
      : words_((colours + BITS - 1) / BITS),
        edges_(vertices, colours),
        free_(vertices, words_, ~uint64_t{0}),
        lowest_(vertices) {
    for (int64_t vertex = 0; vertex < vertices; ++vertex) free_[vertex][words_ - 1] >>= words_ * BITS - colours;
  }

  bool is_free(int64_t vertex, int64_t colour) const {
    return (free_[vertex][colour / BITS] >> (colour % BITS) & 1) != 0;
  }
  int64_t edge(int64_t vertex, int64_t colour) const { return edges_[vertex][colour]; }
  void take(int64_t vertex, int64_t colour, int64_t edge) {
    edges_[vertex][colour] = static_cast<int32_t>(edge);
    free_[vertex][colour / BITS] &= ~(uint64_t{1} << (colour % BITS));
  }
  void give(int64_t vertex, int64_t colour) {
    free_[vertex][colour / BITS] |= uint64_t{1} << (colour % BITS);
    lowest_[vertex] = std::min(lowest_[vertex], colour / BITS);
  }
  // The first free colour at a vertex, which must have one.
  int64_t first(int64_t vertex) {
    int64_t& word = lowest_[vertex];
    while (free_[vertex][word] == 0) ++word;
    return word * BITS + std::countr_zero(free_[vertex][word]);
  }
  // The first colour that is free at both vertices, or -1.
  int64_t first(int64_t u, int64_t v) const {
    const Column<uint64_t> left = free_[u], right = free_[v];
    for (int64_t word = std::max(lowest_[u], lowest_[v]); word < words_; ++word)
      if (const uint64_t both = left[word] & right[word]) return word * BITS + std::countr_zero(both);
    return -1;
  }

 private:
  int64_t words_;
  Array2<int32_t> edges_;
  Array2<uint64_t> free_;
  Array<int64_t> lowest_;
};

// Swaps two colours along the path that leaves a vertex on colour `from`, which is free there afterwards.
void swap_path(Colours& colours, Column<const Edge> edges, Column<int32_t> colour, int64_t vertex, int64_t from,
               int64_t to) {
  int64_t edge = colours.edge(vertex, from);
  colours.give(vertex, from);
  while (edge >= 0) {
    const int64_t other = edges[edge].other(vertex);
    const int64_t next_edge = colours.is_free(other, to) ? -1 : colours.edge(other, to);
    colour[edge] = static_cast<int32_t>(to);
    colours.take(vertex, to, edge);
    colours.take(other, to, edge);
    if (colours.edge(other, from) == edge) colours.give(other, from);
    vertex = other;
    edge = next_edge;
    std::swap(from, to);
  }
}

}  // namespace

// Searching all colours for one that is free at both ends costs less than the swaps that it saves.
Array<int32_t> colour_edges(Ints src, Ints dst, int64_t ranks, int64_t count) {
  Array<int32_t> colour(src.size());
  Array<Edge> edges(src.size());
  for (int64_t edge = 0; edge < src.size(); ++edge) edges[edge] = {src[edge], ranks + dst[edge]};
  Colours colours(2 * ranks, count);
  for (int64_t edge = 0; edge < edges.size(); ++edge) {
    const auto [u, v] = edges[edge];
    const int64_t left = colours.first(u), right = colours.first(v);
    int64_t shared = colours.first(u, v);
    if (shared < 0) {  // one colour is free at u, another at v: swap them along the path from v, which cannot reach u
      shared = left;
      swap_path(colours, edges, colour, v, left, right);
    }
    colour[edge] = static_cast<int32_t>(shared);
    colours.take(u, shared, edge);
    colours.take(v, shared, edge);
  }
  return colour;
}

static const Area area("matching", [](nb::module_& m) {
  def(m, "colours(src, dst, ranks, count)", colour_edges);
});

}  // namespace apportion
