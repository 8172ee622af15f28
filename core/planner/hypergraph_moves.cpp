// Fiduccia-Mattheyses refinement (1982): assigns the vertices without tokens once the homes of tokens are fixed.
//
//   settle   assigns each vertex to the part where it adds the least cost
//   repair   moves the vertices with the lowest cost per FLOP from parts above their caps to parts with room; the cost
//            of a hyperedge that is new to a part is shared with the vertices of it that may follow
//   refine   moves single vertices, if that lowers the cost within the caps
//   regroup  moves all vertices that a hyperedge has on one part to another, on the same condition

#include "ir/sorting.hpp"
#include "planner/hypergraph.hpp"
#include "planner/numbers.hpp"

namespace apportion {

namespace {

// With more than MANY vertices, the cheapest vertex to move takes along all whose cost per FLOP is within NEAR of its
// own: for a document of 256 blocks in 8 head groups, this is 150 times faster and costs a tenth more bytes.
constexpr int64_t MANY = 20'000;
constexpr double NEAR = 0.1;
// Passes of `refine` and `regroup`; more would gain almost nothing.
constexpr int PASSES = 3;
// Maximum rounds of `repair`: a constant plus a number per vertex.
constexpr int64_t REPAIRS = 256, REPAIRS_OF_VERTEX = 4;

class Board {
 public:
  Board(const Graph& graph, const Movable& input, Column<int64_t> part) : graph_(graph), input_(input), part_(part) {
    for (int64_t v = 0; v < part.size(); ++v)
      if (part[v] >= 0) enter(v, part[v]);
  }

  // Assigns every movable vertex without a part to the part where it adds the least cost; ties go to the least full.
  // Vertices of the most expensive hyperedges come first, and vertices of one hyperedge come together.
  void settle() {
    Array<int64_t> falling(graph_.edges()), order(graph_.edges());
    for (int64_t edge = 0; edge < graph_.edges(); ++edge) falling[edge] = -graph_.price[edge];
    stable_order(falling, order);
    for (const int64_t edge : order)
      for (const int64_t v : graph_.vertices_of(edge)) settle_one(v);
    for (int64_t v = 0; v < part_.size(); ++v) settle_one(v);
  }

  // Moves vertices out of parts above their cap until none is above it, no vertex can leave, or the rounds run out.
  void repair() {
    const int64_t rounds = REPAIRS_OF_VERTEX * part_.size() + REPAIRS;
    Array<int64_t> group(graph_.edges());
    for (int64_t round = 0; round < rounds; ++round) {
      int64_t full = 0;
      for (int64_t p = 1; p < load_.size(); ++p)
        if (excess(p) > excess(full)) full = p;
      if (excess(full) <= 0) return;
      weigh(full, group);
      const Step step = cheapest(full, group);
      if (step.vertex < 0) return;
      follow(full, step, group);
    }
  }

  // Moves single vertices if this lowers the cost and the caps allow it.
  void refine() {
    for (int pass = 0; pass < PASSES; ++pass) {
      bool moved = false;
      for (int64_t v = 0; v < part_.size(); ++v) {
        if (!input_.movable[v]) continue;
        const int64_t saved = saved_by(v);
        if (saved == 0) continue;
        int64_t best = -1, max_gain = 0;
        for (int64_t p = input_.base[v]; p < input_.base[v] + input_.span; ++p) {
          if (p == part_[v] || load_[p] + input_.flops[v] > input_.cap[p]) continue;
          const int64_t gain = saved - added_by(v, p);
          if (gain > max_gain) {
            best = p;
            max_gain = gain;
          }
        }
        if (best < 0) continue;
        move(v, best);
        moved = true;
      }
      if (!moved) return;
    }
  }

  // Moves all vertices that a hyperedge has on one part to another if this lowers the cost and the caps allow it.
  void regroup() {
    Array<int64_t> added(load_.size()), seen(load_.size());
    for (int pass = 0; pass < PASSES; ++pass) {
      bool moved = false;
      std::fill(seen.begin(), seen.end(), -1);
      for (int64_t edge = 0; edge < graph_.edges(); ++edge) {
        for (int64_t at = graph_.ptr[edge]; at < graph_.ptr[edge + 1]; ++at) {
          const int64_t v = graph_.pins[at];
          if (!input_.movable[v] || seen[part_[v]] == edge) continue;
          seen[part_[v]] = edge;
          const Column<const int64_t> rest = graph_.pins.slice(at, graph_.ptr[edge + 1]);
          const int64_t to = better_for_all(edge, rest, added);
          if (to < 0) continue;
          const int64_t from = part_[v];
          for (const int64_t w : rest)
            if (part_[w] == from && input_.movable[w]) move(w, to);
          moved = true;
        }
      }
      if (!moved) return;
    }
  }

 private:
  struct Link {
    int64_t after = -1, before = -1;
  };
  struct Step {
    int64_t vertex = -1, to = -1;
    double rate = 0;  // cost per FLOP
  };

  int64_t excess(int64_t p) const { return load_[p] - input_.cap[p]; }

  void enter(int64_t v, int64_t p) {
    part_[v] = p;
    load_[p] += input_.flops[v];
    for (const int64_t edge : graph_.edges_of(v)) ++pins_[edge][p];
    if (!input_.movable[v]) return;
    links_[v] = {head_[p], -1};
    if (head_[p] >= 0) links_[head_[p]].before = v;
    head_[p] = v;
  }

  void leave(int64_t v) {
    const int64_t p = part_[v];
    const auto [after, before] = links_[v];
    load_[p] -= input_.flops[v];
    for (const int64_t edge : graph_.edges_of(v)) --pins_[edge][p];
    (before >= 0 ? links_[before].after : head_[p]) = after;
    if (after >= 0) links_[after].before = before;
  }

  void move(int64_t v, int64_t p) {
    leave(v);
    enter(v, p);
  }

  void settle_one(int64_t v) {
    if (part_[v] >= 0 || !input_.movable[v]) return;
    int64_t best = -1, min_added = 0;
    for (int64_t p = input_.base[v]; p < input_.base[v] + input_.span; ++p) {
      const int64_t added = added_by(v, p);
      if (best < 0 || added < min_added || (added == min_added && load_[p] * input_.cap[best] < load_[best] * input_.cap[p])) {
        best = p;
        min_added = added;
      }
    }
    enter(v, best);
  }

  // The increase in the cost of v's hyperedges if v is put on p, disregarding its current part.
  int64_t added_by(int64_t v, int64_t p) const {
    int64_t added = 0;
    for (const int64_t edge : graph_.edges_of(v))
      if (pins_[edge][p] == 0) added += graph_.price[edge];
    return added;
  }

  // The decrease in the cost of v's hyperedges if v leaves its part.
  int64_t saved_by(int64_t v) const {
    int64_t saved = 0;
    for (const int64_t edge : graph_.edges_of(v))
      if (pins_[edge][part_[v]] == 1) saved += graph_.price[edge];
    return saved;
  }

  // Fills `group` with the FLOPs of each hyperedge that may leave `full`.
  void weigh(int64_t full, Column<int64_t> group) const {
    std::fill(group.begin(), group.end(), 0);
    for (int64_t v = head_[full]; v >= 0; v = links_[v].after)
      for (const int64_t edge : graph_.edges_of(v)) group[edge] += input_.flops[v];
  }

  // The vertex that leaves `full` at the lowest cost per FLOP: one that fits elsewhere, or else one after whose move
  // the fuller of the two parts is less full than `full` is now.
  Step cheapest(int64_t full, Column<const int64_t> group) const {
    Step best;
    int64_t min_over = 0, max_room = 0;
    if (head_[full] < 0) return best;
    const int64_t low = input_.base[head_[full]], high = low + input_.span;  // vertices of one part have one base
    for (int64_t p = low; p < high; ++p) max_room = std::max(max_room, -excess(p));
    for (int64_t v = head_[full]; v >= 0; v = links_[v].after) {
      if (input_.flops[v] <= 0) continue;
      for (int64_t p = low; p < high; ++p) {
        const int64_t room = -excess(p), over = std::max<int64_t>(0, input_.flops[v] - room);
        if (p == full || 4 * room < max_room || over >= excess(full)) continue;
        const double rate = rate_of(v, full, p, std::min(excess(full), room), group);
        if (best.vertex < 0 || over < min_over || (over == min_over && rate < best.rate)) {
          best = {v, p, rate};
          min_over = over;
        }
      }
    }
    return best;
  }

  // The cost per FLOP of moving v to p if up to `wanted` FLOPs of other vertices may follow.
  double rate_of(int64_t v, int64_t full, int64_t p, int64_t wanted, Column<const int64_t> group) const {
    const int64_t flops = input_.flops[v];
    double cost = 0;
    for (const int64_t edge : graph_.edges_of(v)) {
      const Column<int32_t> pins = pins_[edge];
      const int64_t price = graph_.price[edge];
      if (pins[p] == 0)
        cost += real(price * flops) / real(std::max(flops, std::min(group[edge], wanted)));
      if (pins[full] == 1) cost -= real(price);
    }
    return cost / real(flops);
  }

  // Moves a vertex and, while it helps, vertices of its most expensive new hyperedge that cost no more; see also
  // `MANY`.
  void follow(int64_t full, const Step& step, Column<const int64_t> group) {
    int64_t new_edge = -1, highest_price = -1;
    for (const int64_t edge : graph_.edges_of(step.vertex)) {
      if (pins_[edge][step.to] != 0 || graph_.price[edge] <= highest_price) continue;
      new_edge = edge;
      highest_price = graph_.price[edge];
    }
    move(step.vertex, step.to);
    if (new_edge >= 0)
      for (const int64_t w : graph_.vertices_of(new_edge))
        if (part_[w] == full && input_.movable[w]) try_to_follow(full, w, step.to, step.rate, group);
    if (part_.size() <= MANY) return;
    for (int64_t w = head_[full], after; w >= 0; w = after) {
      after = links_[w].after;
      try_to_follow(full, w, step.to, step.rate + NEAR * std::abs(step.rate), group);
    }
  }

  void try_to_follow(int64_t full, int64_t w, int64_t p, double limit, Column<const int64_t> group) {
    const int64_t room = -excess(p), flops = input_.flops[w];
    if (excess(full) <= 0 || flops > room || flops == 0) return;
    if (rate_of(w, full, p, std::min(excess(full), room), group) <= limit) move(w, p);
  }

  // The best part for the hyperedge's movable vertices on the part of `rest`'s first vertex; -1 if they should stay.
  // Hyperedges that two of them share count twice. added: scratch, by part.
  int64_t better_for_all(int64_t edge, Column<const int64_t> rest, Column<int64_t> added) const {
    const int64_t from = part_[rest[0]], low = input_.base[rest[0]], high = low + input_.span;
    const int64_t price = graph_.price[edge];
    int64_t saved = 0, weight = 0, count = 0;
    for (const int64_t v : rest) {
      if (part_[v] != from || !input_.movable[v]) continue;
      saved += saved_by(v);
      weight += input_.flops[v];
      ++count;
    }
    if (count == pins_[edge][from] && count > 1) saved += price;
    if (saved == 0) return -1;
    std::fill(added.begin() + low, added.begin() + high, 0);
    for (const int64_t v : rest) {
      if (part_[v] != from || !input_.movable[v]) continue;
      for (const int64_t other : graph_.edges_of(v)) {
        if (other == edge) continue;
        const Column<int32_t> pins = pins_[other];
        for (int64_t p = low; p < high; ++p)
          if (pins[p] == 0) added[p] += graph_.price[other];
      }
    }
    int64_t best = -1, max_gain = 0;
    for (int64_t p = low; p < high; ++p) {
      if (p == from || load_[p] + weight > input_.cap[p]) continue;
      const int64_t gain = saved - added[p] - (pins_[edge][p] == 0 ? price : 0);
      if (gain > max_gain) {
        best = p;
        max_gain = gain;
      }
    }
    return best;
  }

  const Graph graph_;
  const Movable input_;
  Column<int64_t> part_;
  Array<int64_t> load_{input_.cap.size()};
  Array2<int32_t> pins_{graph_.edges(), load_.size()};  // vertices of each hyperedge in each part
  Array<int64_t> head_{load_.size(), -1};  // heads of the linked lists of the movable vertices of each part
  Array<Link> links_{part_.size()};
};

}  // namespace

Array<int64_t> spread(const Graph& graph, Column<const int64_t> part, const Movable& input, bool thorough) {
  Array<int64_t> result = Array<int64_t>::of(part);
  Board board(graph, input, result);
  board.settle();
  board.repair();
  board.refine();
  if (!thorough) return result;
  board.regroup();
  board.refine();
  return result;
}

Array<int64_t> polish(const Graph& graph, Column<const int64_t> part, const Movable& input) {
  Array<int64_t> result = Array<int64_t>::of(part);
  Board board(graph, input, result);
  board.regroup();
  board.refine();
  return result;
}

}  // namespace apportion
