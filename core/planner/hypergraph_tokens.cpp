// Assigns homes to the vertices that hold tokens: apportion/planner/solvers/hypergraph/tokens.py.

#include "planner/hypergraph.hpp"

namespace apportion {

namespace {

// Connected clusters are placed as one item if they take at most this fraction of a part's caps.
constexpr double WHOLE_SHARE = 0.5;

class Parts {
 public:
  Parts(const Graph& graph, const ClusterInput& input, double rate, Column<int64_t> part)
      : graph_(graph), input_(input), rate_(rate), part_(part) {
    for (int64_t v = 0; v < part.size(); ++v) {
      if (part[v] >= 0) {
        enter(v, part[v]);
      } else if (part[v] == -1) {
        parts_[input.base[v]].rest_flops += input.flops[v];
        parts_[input.base[v]].rest_tokens += input.tokens[v];
      }
    }
  }

  // Places the clusters of an item together if a part has room for all of them, otherwise one by one.
  void place(Column<const int64_t> members) {
    if (part_[members[0]] != -1) return;
    const int64_t together = cheapest(members);
    for (int64_t i = 0; i < members.size(); ++i) {
      const int64_t v = members[i], p = together >= 0 ? together : cheapest(members.slice(i, i + 1));
      if (p < 0) continue;
      enter(v, p);
      parts_[input_.base[v]].rest_flops -= input_.flops[v];
      parts_[input_.base[v]].rest_tokens -= input_.tokens[v];
    }
  }

 private:
  struct Part {
    int64_t load = 0, used = 0;                // flops and tokens
    int64_t rest_flops = 0, rest_tokens = 0;  // still to be placed in a span; kept by its first part
  };

  void enter(int64_t v, int64_t p) {
    part_[v] = p;
    parts_[p].load += input_.flops[v];
    parts_[p].used += input_.tokens[v];
    for (const int64_t edge : graph_.edges_of(v)) seen_[edge][p] = true;
  }

  // The part where the members cost the least; -1 if no part has room for their tokens.
  int64_t cheapest(Column<const int64_t> members) const {
    const int64_t low = input_.base[members[0]];
    int64_t weight = 0, size = 0, best = -1;
    for (const int64_t v : members) {
      weight += input_.flops[v];
      size += input_.tokens[v];
    }
    const double density = static_cast<double>(parts_[low].rest_flops) /
                           static_cast<double>(std::max<int64_t>(1, parts_[low].rest_tokens));
    double min_cost = 0, min_end = 0;
    for (int64_t p = low; p < low + input_.span; ++p) {
      const int64_t room = input_.tokens_cap[p] - parts_[p].used - size;
      if (room < 0) continue;
      const auto cap = static_cast<double>(std::max<int64_t>(1, input_.flops_cap[p]));
      const double end = (static_cast<double>(parts_[p].load + weight) + static_cast<double>(room) * density) / cap;
      double cost = std::max(0.0, end - 1) * cap * rate_;
      if (members.size() == 1)  // a whole item shares no hyperedge with placed clusters
        for (const int64_t edge : graph_.edges_of(members[0]))
          if (!seen_[edge][p]) cost += static_cast<double>(graph_.price[edge]);
      if (best < 0 || cost < min_cost || (cost == min_cost && end < min_end)) {
        best = p;
        min_cost = cost;
        min_end = end;
      }
    }
    return best;
  }

  const Graph graph_;
  const ClusterInput input_;
  const double rate_;
  Column<int64_t> part_;
  Array<Part> parts_{input_.flops_cap.size()};
  Array2<bool> seen_{graph_.edges(), parts_.size()};  // whether a hyperedge has a cluster in a part
};

// The clusters that are placed as one item, and the order of placement.
struct Items {
  Array<int64_t> item;   // for each cluster, the first cluster of its item; -1 - its own number if it is placed alone
  Growing<int64_t> order;  // clusters by descending density of their item
};

Items items_of(const Graph& graph, const ClusterInput& input, Column<const int64_t> part) {
  const int64_t count = part.size();
  Array<int64_t> flops(count), tokens(count);
  const Array<int64_t> root = components(graph.all(), input.base, [&](int64_t v) { return part[v] == -1; });
  for (int64_t v = 0; v < count; ++v) {
    flops[root[v]] += input.flops[v];
    tokens[root[v]] += input.tokens[v];
  }
  const auto share_of = [](Column<const int64_t> caps) {
    return WHOLE_SHARE * static_cast<double>(*std::min_element(caps.begin(), caps.end()));
  };
  const double max_flops = share_of(input.flops_cap), max_tokens = share_of(input.tokens_cap);
  Items items{Array<int64_t>(count), {}};
  Array<double> density(count);
  for (int64_t v = 0; v < count; ++v) {
    const int64_t r = root[v];
    const bool whole = static_cast<double>(flops[r]) <= max_flops && static_cast<double>(tokens[r]) <= max_tokens;
    items.item[v] = whole ? r : -1 - v;
    density[v] = static_cast<double>(whole ? flops[r] : input.flops[v]) /
                 static_cast<double>(std::max<int64_t>(1, whole ? tokens[r] : input.tokens[v]));
  }
  items.order = ordered(count, [&](int64_t a, int64_t b) {
    return density[a] != density[b] ? density[a] > density[b] : root[a] < root[b];
  });
  return items;
}

}  // namespace

Array<int64_t> anchors(const Hyperedges& edges, Column<const int64_t> cluster) {
  Array<int64_t> anchor = Array<int64_t>::of(cluster), best(cluster.size(), -1);
  for (int64_t edge = 0; edge < edges.count(); ++edge) {
    const Column<const int64_t> pins = edges.vertices_of(edge);
    const auto first = std::find_if(pins.begin(), pins.end(), [&](int64_t v) { return cluster[v] >= 0; });
    if (first == pins.end()) continue;
    for (const int64_t v : pins) {
      if (cluster[v] >= 0 || edges.price[edge] <= best[v]) continue;
      anchor[v] = cluster[*first];
      best[v] = edges.price[edge];
    }
  }
  return anchor;
}

Clusters clusters(const Hyperedges& edges, Column<const int64_t> flops, Column<const int64_t> cluster, int64_t count) {
  Clusters result;
  result.flops.fill(count, 0);
  const Array<int64_t> anchor = anchors(edges, cluster), seen(count, -1);
  for (int64_t v = 0; v < anchor.size(); ++v)
    if (anchor[v] >= 0) result.flops[anchor[v]] += flops[v];
  for (int64_t edge = 0; edge < edges.count(); ++edge) {
    const std::size_t begin = result.pins.size();
    for (const int64_t v : edges.vertices_of(edge)) {
      const int64_t target = anchor[v];
      if (target < 0 || seen[target] == edge) continue;
      seen[target] = edge;
      result.pins.push_back(target);
    }
    if (result.pins.size() < begin + 2) {
      result.pins.resize(begin);
      continue;
    }
    result.ptr.push_back(result.pins.count());
    result.price.push_back(edges.price[edge]);
  }
  return result;
}

Array<int64_t> place(const Graph& graph, Column<const int64_t> part, const ClusterInput& input, double rate) {
  const Items items = items_of(graph, input, part);
  Array<int64_t> result = Array<int64_t>::of(part);
  Parts parts(graph, input, rate, result);
  const int64_t count = part.size();
  for (int64_t at = 0, end; at < count; at = end) {
    const int64_t item = items.item[items.order[at]];
    for (end = at + 1; end < count && item >= 0 && items.item[items.order[end]] == item;) ++end;
    parts.place(Column<const int64_t>(items.order).slice(at, end));
  }
  return result;
}

}  // namespace apportion
