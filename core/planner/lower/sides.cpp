#include "planner/lower/sides.hpp"

namespace apportion::lower {

namespace {

enum LaneSide { KEYS, QUERIES };  // bit 0 of lanes

// For each edge, the round after whose stage the last task that uses its tile has run.
Growing<int32_t> last_uses(const Lowering& low) {
  Growing<int32_t> back(low.edges.size());
  for (int64_t edge = 0; edge < back.count(); ++edge) back[edge] = narrow(low.schedule.round[edge]);
  if (!low.later()) return back;
  const auto use = [&](int64_t edge, int64_t task) {
    if (edge >= 0) back[edge] = std::max(back[edge], narrow(low.stage[task] - low.schedule.leads));
  };
  for (int64_t task = 0; task < low.tasks.size(); ++task) use(low.tasks.query_edge[task], task);
  for (int64_t part = 0; part < low.parts.task.size(); ++part) use(low.parts.edge[part], low.parts.task[part]);
  return back;
}

// Splits the edges into the tiles of both sides; returns the number of each among the tiles of its side.
Growing<int32_t> add_tiles(const Lowering& low, Sides& sides) {
  const Growing<int32_t> back = last_uses(low);
  Growing<int32_t> place(low.edges.size());
  sides.keys.tiles.expect(low.edges.size());
  for (int64_t edge = 0; edge < place.count(); ++edge) {
    Tile tile{low.edges[edge], narrow(edge), narrow(low.schedule.round[edge]), back[edge],
              narrow(low.schedule.returns_to[edge])};
    Growing<Tile>& tiles = (tile.lane & 1) == QUERIES ? sides.queries.tiles : sides.keys.tiles;
    if (tile.parent >= 0) tile.parent = place[tile.parent];
    place[edge] = narrow(tiles.count());
    tiles.push_back(tile);
  }
  for (Side* side : {&sides.queries, &sides.keys})
    for (Tile& tile : side->tiles)
      if (tile.returns_to >= 0) tile.returns_to = place[tile.returns_to];
  return place;
}

// The rows of a rank that leave it, as the begins and ends of ranges.
class LeavingRows {
 public:
  void add(int64_t begin, int64_t end) {
    if (!low_.empty() && begin <= high_.back() && end >= low_.back()) {
      low_.back() = std::min(begin, low_.back());
      high_.back() = std::max(end, high_.back());
    } else {
      low_.push_back(begin);
      high_.push_back(end);
    }
  }
  void sort() {
    std::ranges::sort(low_);
    std::ranges::sort(high_);
  }
  // True, after sorting, if no row in [begin, end) leaves: every range that begins before `end` ends by `begin`.
  bool keeps(int64_t begin, int64_t end) const {
    return std::lower_bound(low_.begin(), low_.end(), end) - low_.begin() ==
           std::upper_bound(high_.begin(), high_.end(), begin) - high_.begin();
  }

 private:
  std::vector<int64_t> low_, high_;
};

// The rows of one side that leave home, for each rank.
Growing<LeavingRows> leaving(const Lowering& low, const Side& side) {
  Growing<LeavingRows> by_home(low.rows.size());
  for (const Tile& tile : side.tiles)
    if (tile.parent < 0) by_home[tile.home].add(tile.row, tile.row + tile.rows);
  for (LeavingRows& ranges : by_home) ranges.sort();
  return by_home;
}

// Finds the tasks that open rows at home and in tiles. results: how many entries at the end of `at_home` are returned
// results, which count as further tasks.
void open(const Lowering& low, Side& side, const Growing<WrittenRows>& at_home, const Growing<WrittenRows>& in_tiles,
          int64_t results = 0) {
  const int64_t tasks = low.tasks.size(), groups = side.heads.size();
  Growing<int64_t> lane_rows(low.rows.size() * groups), tile_rows(side.tiles.count());
  for (int64_t lane = 0; lane < lane_rows.count(); ++lane) lane_rows[lane] = low.rows[lane / groups];
  for (int64_t tile = 0; tile < tile_rows.count(); ++tile) tile_rows[tile] = side.tiles[tile].rows;
  Openers openers = find_openers(at_home, lane_rows, tasks + results);
  side.opening = std::move(openers.flags);
  side.opening.resize(static_cast<std::size_t>(tasks));
  side.cleared = std::move(openers.cleared);
  if (side.tiles.empty()) return;
  openers = find_openers(in_tiles, tile_rows, tasks);
  for (int64_t task = 0; task < tasks; ++task) side.opening[task] |= openers.flags[task];
  side.tiles_cleared = std::move(openers.cleared);
}

// Finds the tasks that open rows of queries. Results of rows that left home may return before a later stage; returned
// results overwrite their rows like tasks that come after all others.
void open_queries(const Lowering& low, Side& side) {
  const Growing<LeavingRows> away = low.queries_move ? leaving(low, side) : Growing<LeavingRows>();
  const int64_t groups = side.heads.size(), tasks = low.tasks.size();
  Growing<WrittenRows> at_home, in_tiles;
  int64_t results = 0;
  at_home.expect(tasks);
  for (int64_t task = 0; task < tasks; ++task) {
    const TaskRows& used = side.used[task];
    if (used.tile >= 0) {
      in_tiles.push_back({narrow(task), used.tile, used.row - side.tiles[used.tile].row, used.rows, true});
      continue;
    }
    const int64_t rank = low.tasks.exec[task];
    const bool may_open = !low.queries_move || low.stage[task] < low.schedule.leads ||
                     away[rank].keeps(used.row, used.row + used.rows);
    at_home.push_back({narrow(task), narrow(rank * groups + used.group), used.row, used.rows, may_open});
  }
  for (int64_t tile = 0; tile < low.whole_results.size(); ++tile) {
    const Tile& sent = side.tiles[tile];
    if (low.whole_results[tile]) at_home.push_back({narrow(tasks + results++), sent.home, sent.row, sent.rows, true});
  }
  open(low, side, at_home, in_tiles, results);
}

// Finds the tasks that open rows of keys. Gradients of rows that left home may return before a later stage, even to a
// tile that is passed on; and a head group must not overwrite what another one added to KV heads that both use.
void open_keys(const Lowering& low, Side& side, const Growing<int32_t>& place) {
  const Growing<LeavingRows> away = leaving(low, side);
  Growing<uint8_t> passed_on(side.tiles.count());
  for (const Tile& tile : side.tiles)
    if (tile.parent >= 0) passed_on[tile.parent] = 1;
  Growing<WrittenRows> at_home, in_tiles;
  in_tiles.expect(low.parts.task.size());
  for (int64_t part = 0; part < low.parts.task.size(); ++part) {
    const int64_t edge = low.parts.edge[part], leads = low.schedule.leads;
    const int32_t task = narrow(low.parts.task[part]), row = narrow(low.parts.row[part]);
    const int32_t rows = narrow(low.parts.keys[part]);
    if (edge >= 0) {
      const int32_t tile = place[edge];
      const bool late = low.later() && low.stage[task] > leads + side.tiles[tile].round;
      in_tiles.push_back({task, tile, row, rows, !late || passed_on[tile] == 0});
      continue;
    }
    const int64_t rank = low.tasks.exec[task];
    const bool may_open = !low.keys_overlap && (low.stage[task] < leads || away[rank].keeps(row, row + rows));
    at_home.push_back({task, narrow(rank * side.heads.size() + side.used[task].group), row, rows, may_open});
  }
  open(low, side, at_home, in_tiles);
}

}  // namespace

Sides sides_of(const Lowering& low, bool keys_open) {
  Sides sides;
  sides.queries.heads = low.query_sets;
  sides.keys.heads = low.key_sets;
  const Growing<int32_t> place = add_tiles(low, sides);
  const auto tile_of = [&](int64_t edge) { return edge < 0 ? -1 : place[edge]; };
  for (Side* side : {&sides.queries, &sides.keys}) side->used.expect(low.tasks.size());
  for (int64_t at = 0; at < low.tasks.size(); ++at) {
    const Task task = low.tasks[at];
    sides.queries.used.push_back({tile_of(task.query_edge), narrow(task.group), narrow(task.row), narrow(task.rows)});
    sides.keys.used.push_back({tile_of(task.edge), narrow(low.shared[task.group]), narrow(low.key_row(task)),
                               narrow(task.keys())});
  }
  open_queries(low, sides.queries);
  if (keys_open) open_keys(low, sides.keys, place);
  return sides;
}

}  // namespace apportion::lower
