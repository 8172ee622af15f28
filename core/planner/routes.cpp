// Routes of tiles over gateways, rings and chains of ranks: apportion/planner/route.
//
//   star      an edge from a tile's home to every rank that needs rows of it
//   gateways  a group of the star is one tile's edges to one node: one rank there, the gateway, receives the rows of
//             all these edges and passes them on; edges that leave home come first, then those from gateways
//   chains    tiles travel around rings of ranks, each as far as the last rank that needs it; edges are listed tile by
//             tile, hop by hop

#include "bind.hpp"
#include "ir/sorting.hpp"
#include "planner/numbers.hpp"

namespace apportion {

namespace {

// The position of a rank among ascending ones.
int64_t place_of(int64_t rank, Column<const int64_t> members) {
  return std::lower_bound(members.begin(), members.end(), rank) - members.begin();
}

struct Star {
  Ints tile, home, row, rows, dst, lane;

  int64_t size() const { return tile.size(); }
  int64_t end(int64_t edge) const { return row[edge] + rows[edge]; }
};

struct Nodes {
  int64_t ranks, ranks_per_node;

  int64_t of(int64_t rank) const { return rank / ranks_per_node; }
};

// The edges order[first, end) of one tile to one node. low, high: the range of rows of all these edges; gate: the
// gateway, -1 if the tile's home is in the node; entry: the edge that brings the tile to the gateway.
struct Group {
  int64_t first, end, low, high, gate = -1, entry = -1;
};

struct GroupedEdges {
  Array<int64_t> order;  // edges by tile and receiver
  Growing<Group> groups;
};

GroupedEdges group(const Star& star, const Nodes& nodes) {
  Growing<int64_t> keys;
  for (int64_t edge = 0; edge < star.size(); ++edge) keys.push_back(star.tile[edge] * nodes.ranks + star.dst[edge]);
  GroupedEdges grouped{Array<int64_t>(star.size()), {}};
  stable_order(keys, grouped.order);
  int64_t tile = -1, node = -1, at = 0;
  for (const int64_t edge : grouped.order) {
    if (tile != star.tile[edge] || node != nodes.of(star.dst[edge]))
      grouped.groups.push_back({at, at, star.row[edge], star.row[edge]});
    tile = star.tile[edge], node = nodes.of(star.dst[edge]);
    Group& last = grouped.groups.back();
    last.low = std::min(last.low, star.row[edge]);
    last.high = std::max(last.high, star.end(edge));
    last.end = ++at;
  }
  return grouped;
}

// Serves small groups first: if only one rank can be their gateway, larger groups must not have loaded it before. The
// gateway is the rank with the fewest received rows so far. proxies: whether a rank that does not need the tile may be
// a gateway.
void choose_gateways(const Star& star, const Nodes& nodes, bool proxies, GroupedEdges& grouped) {
  std::vector<const Group*> by_size;
  for (const Group& item : grouped.groups) by_size.push_back(&item);
  std::ranges::stable_sort(by_size, {}, [](const Group* item) { return item->end - item->first; });
  const Array<int64_t> received(nodes.ranks);
  for (const Group* item : by_size) {
    Group& target = grouped.groups[item - grouped.groups.data()];
    const int64_t* edges = grouped.order.data();
    int64_t gate = star.dst[edges[target.first]];
    const int64_t node = nodes.of(gate), rows = target.high - target.low;
    if (nodes.of(star.home[edges[target.first]]) == node) continue;
    for (int64_t at = target.first; at < target.end; ++at)
      if (received[star.dst[edges[at]]] < received[gate]) gate = star.dst[edges[at]];
    if (proxies) {
      const int64_t* begin = received.begin() + node * nodes.ranks_per_node;
      const int64_t idle = std::min_element(begin, begin + nodes.ranks_per_node) - received.begin();
      if (received[idle] + rows < received[gate]) gate = idle;
    }
    target.gate = gate;
    received[gate] += rows;
  }
}

// The edges through gateways, and for each edge of the star, the edge that replaces it.
std::pair<Growing<Edge>, Array<int32_t>> through_gateways(const Star& star, const Nodes& nodes, bool proxies) {
  GroupedEdges grouped = group(star, nodes);
  choose_gateways(star, nodes, proxies, grouped);
  const int64_t* order = grouped.order.data();
  int64_t roots = 0;
  for (Group& item : grouped.groups) {
    for (int64_t at = item.first; at < item.end; ++at) {
      if (item.gate == star.dst[order[at]]) item.entry = roots;
      roots += item.gate < 0 || item.gate == star.dst[order[at]];
    }
  }
  int64_t relay = roots, root = 0;
  for (Group& item : grouped.groups)
    if (item.gate >= 0 && item.entry < 0) item.entry = relay++;
  Growing<Edge> edges(star.size() + relay - roots);
  Array<int32_t> arrives(star.size());
  const auto put = [&](int64_t at, int64_t edge, int64_t low, int64_t end, int64_t src, int64_t dst, int64_t parent) {
    edges[at] = {narrow(star.tile[edge]), narrow(star.home[edge]), narrow(low),    narrow(end - low),
                 narrow(src),             narrow(dst),             narrow(parent), narrow(star.lane[edge])};
  };
  for (const Group& item : grouped.groups) {
    const int64_t first = order[item.first];
    if (item.gate >= 0 && item.entry >= roots)
      put(item.entry, first, item.low, item.high, star.home[first], item.gate, -1);
    for (int64_t at = item.first; at < item.end; ++at) {
      const int64_t edge = order[at], dst = star.dst[edge];
      arrives[edge] = narrow(item.gate >= 0 && item.gate != dst ? relay : root);
      if (item.gate >= 0 && item.gate != dst)
        put(relay++, edge, star.row[edge], star.end(edge), item.gate, dst, item.entry);
      else if (item.gate >= 0)
        put(root++, edge, item.low, item.high, star.home[edge], dst, -1);
      else
        put(root++, edge, star.row[edge], star.end(edge), star.home[edge], dst, -1);
    }
  }
  return {std::move(edges), std::move(arrives)};
}

// The members of a ring are the ascending ranks flat[first[ring] : first[ring + 1]].
struct Rings {
  Column<const int64_t> flat, first;

  Column<const int64_t> members(int64_t ring) const { return flat.slice(first[ring], first[ring + 1]); }
};

// depth: the number of earlier edges of the tile.
struct Hop {
  Edge edge;
  int32_t depth, ring;
};

// The hops of chains, and for each edge of the star, the hop that replaces it. tile, ring: the tile and the ring of
// each edge of the star. Tile t is part t % parts of a rank's rows. Between ranks of different nodes, each part is
// relayed by a different pair of ranks, one on either node (`shifted`).
std::pair<Growing<Hop>, Array<int32_t>> chains(const Star& star, Ints tile, Ints ring, int64_t parts, const Rings& rings,
                                               int64_t ranks_per_node) {
  struct Tile {
    int64_t low = int64_t{1} << 62, high = 0, hops = 0, home = 0, ring = 0;
  };
  const auto shifted = [&](int64_t rank, int64_t number) {
    const int64_t ahead = number % parts * ranks_per_node / parts;
    return rank - rank % ranks_per_node + (rank + ahead) % ranks_per_node;
  };
  Growing<Tile> tiles;
  Growing<int64_t> ahead;  // for each edge of the star, the number of hops to its receiver
  for (int64_t edge = 0; edge < tile.size(); ++edge) {
    if (tile[edge] >= tiles.count()) tiles.resize(static_cast<std::size_t>(tile[edge]) + 1);
    Tile& current = tiles[tile[edge]];
    const Column<const int64_t> members = rings.members(ring[edge]);
    const int64_t steps = place_of(star.dst[edge], members) - place_of(star.home[edge], members);
    ahead.push_back(steps < 0 ? steps + members.size() : steps);
    current = {std::min(current.low, star.row[edge]), std::max(current.high, star.end(edge)), std::max(current.hops, ahead.back()),
           star.home[edge], ring[edge]};
  }
  Growing<Hop> hops;
  Growing<int64_t> ends, first;  // the edge that ends each hop; the index of each tile's first hop in `ends`
  for (int64_t number = 0; number < tiles.count(); ++number) {
    const Tile& current = tiles[number];
    first.push_back(ends.count());
    if (current.hops == 0) continue;  // there is no tile with this number
    const Column<const int64_t> members = rings.members(current.ring);
    const int64_t begin = place_of(current.home, members);
    int64_t parent = -1, depth = 0;
    for (int64_t hop = 0; hop < current.hops; ++hop) {
      const int64_t u = members[(begin + hop) % members.size()], v = members[(begin + hop + 1) % members.size()];
      const bool inside = u / ranks_per_node == v / ranks_per_node;
      const int64_t path[] = {u, inside ? u : shifted(u, number), inside ? v : shifted(v, number), v};
      for (int step = 0; step < 3; ++step) {
        if (path[step] == path[step + 1]) continue;
        hops.push_back({{narrow(number), narrow(current.home), narrow(current.low), narrow(current.high - current.low),
                         narrow(path[step]), narrow(path[step + 1]), narrow(parent), 0},
                        narrow(depth++),
                        narrow(current.ring)});
        parent = hops.count() - 1;
      }
      ends.push_back(parent);
    }
  }
  Array<int32_t> arrives(tile.size());
  for (int64_t edge = 0; edge < tile.size(); ++edge)
    arrives[edge] = narrow(ends[first[tile[edge]] + ahead[edge] - 1]);
  return {std::move(hops), std::move(arrives)};
}

Array<int64_t> depths(Ints parent) {
  Array<int64_t> depth(parent.size());
  for (int64_t edge = 0; edge < parent.size(); ++edge) depth[edge] = parent[edge] < 0 ? 0 : depth[parent[edge]] + 1;
  return depth;
}

}  // namespace

static const Area area("routes", [](nb::module_& m) {
  def(m, "through_gateways(star, nodes, proxies)", through_gateways);
  def(m, "chains(star, tile, ring, parts, rings, ranks_per_node)", chains);
  def(m, "depths(parent)", depths);
});

}  // namespace apportion
