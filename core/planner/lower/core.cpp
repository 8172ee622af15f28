#include "planner/lower/core.hpp"

#include "ir/sorting.hpp"

namespace apportion::lower {

namespace {

// Rows of a rank that are held from step `start` to step `end`, inclusive.
struct Lifetime {
  int64_t rank, rows, start, end;

  bool shares_place(const Lifetime& other) const { return rank == other.rank && start == other.start; }
};

// The first work row of each tile, such that tiles held at the same time on one rank do not overlap. Tiles that arrive
// at a rank together, which are adjacent in `order`, share a place, the first that is free. All places of a rank are as
// long as its longest arrival, so there are only as many as are held at one time. base: the first row to use on each
// rank.
Growing<int64_t> allot(const Growing<Lifetime>& tiles, const Growing<int64_t>& order, const Growing<int64_t>& base) {
  int64_t span = 0;
  for (const Lifetime& tile : tiles) span = std::max(span, tile.start + 1);
  Growing<int64_t> keys, by_key(order.count()), longest(base.count()), row(tiles.count());
  for (const int64_t tile : order) keys.push_back(tiles[tile].rank * span + tiles[tile].start);
  counting_order<Column<const int64_t>, int64_t>(keys, base.count() * span, by_key);
  for (int64_t& at : by_key) at = order[at];
  int64_t before = -1;
  for (const int64_t tile : by_key) {  // the row within the place
    row[tile] = before >= 0 && tiles[before].shares_place(tiles[tile]) ? row[before] + tiles[before].rows : 0;
    int64_t& length = longest[tiles[tile].rank];
    length = std::max(length, row[tile] + tiles[tile].rows);
    before = tile;
  }
  Growing<int64_t> busy;  // the last step at which each place of the rank is held
  int64_t at = 0;
  before = -1;
  for (const int64_t tile : by_key) {
    const Lifetime& life = tiles[tile];
    if (before < 0 || tiles[before].rank != life.rank) busy.clear();
    if (row[tile] == 0) {
      for (at = 0; at < busy.count() && busy[at] >= life.start;) ++at;
      if (at == busy.count()) busy.push_back(0);
      busy[at] = life.end;
    }
    busy[at] = std::max(busy[at], life.end);
    row[tile] += base[life.rank] + at * longest[life.rank];
    before = tile;
  }
  return row;
}

// The tiles of one side.
class Tiles {
 public:
  Tiles(Program& program, const Lowering& low, const Side& side, const Order& order)
      : program_(program), low_(low), side_(side), tiles_(side.tiles), order_(order) {
    adjacent_ = ordered(tiles_.count(), [&](int64_t a, int64_t b) { return tiles_[a].tile < tiles_[b].tile; });
    for (int64_t group = 0; group < low.rows.size(); ++group) kept_.push_back(low.kept(group));
  }

  // Fetches tiles, with all tensors in the same rows; returns their first work rows. A tile is held until its tasks are
  // done and it is passed on; if tiles stay for the stages of a window, they keep their rows until the end.
  Growing<int64_t> fetch(std::span<const Tensor> tensors) {
    Growing<Lifetime> lifetimes;
    lifetimes.expect(tiles_.count());
    for (const Tile& tile : tiles_) {
      const int64_t used = order_.stage[low_.schedule.leads + tile.back];
      lifetimes.push_back({tile.dst, tile.rows, order_.launch[tile.round], low_.holds() ? program_.steps.count() : used});
    }
    if (!low_.holds()) {
      for (const Tile& tile : tiles_)
        if (tile.parent >= 0) lifetimes[tile.parent].end = std::max(lifetimes[tile.parent].end, order_.wait[tile.round]);
    }
    Growing<int64_t> work = allot(lifetimes, adjacent_, kept_);
    program_.transfers.expect(2 * std::ssize(tensors) * tiles_.count());
    for (const Tensor tensor : tensors) {
      each([&](int64_t at, const Tile& tile) {
        const Operand sent =
            tile.parent < 0 ? at_home(tile, tile, tensor) : side_.inside(at, tile.parent, tensor, work);
        program_.send(order_.launch[tile.round], tile.src, tile.dst, sent);
      });
      each([&](int64_t at, const Tile& tile) {
        program_.receive(order_.launch[tile.round], tile.src, tile.dst, whole(at, tensor, work));
      });
    }
    return work;
  }

  // Sends the sums of each tile to the rank that combines them, or home as results; returns their first work rows.
  Growing<int64_t> bring_back(Tensor tensor) {
    const auto [work, arriving] = room();
    program_.transfers.expect(2 * tiles_.count());
    program_.rowops.expect(side_.tiles_cleared.count() + tiles_.count());
    for (const ClearedRows& cleared : side_.tiles_cleared) {
      const Tile& tile = tiles_[cleared.lane];
      program_.clear(order_.clear[tile.round], tile.dst,
                     rows_of(tensor, Space::WORK, work[cleared.lane] + cleared.row, cleared.rows, heads(tile)));
    }
    const auto into = [&](int64_t at, const Tile& tile) {
      return tile.returns_to < 0 ? at_home(tiles_[root(at)], tile, tensor)
                                 : side_.inside(at, tile.returns_to, tensor, work);
    };
    each([&](int64_t at, const Tile& tile) {
      program_.send(batch(tile).launch, tile.dst, target(tile), whole(at, tensor, work));
    });
    each([&](int64_t at, const Tile& tile) {
      program_.receive(batch(tile).launch, tile.dst, target(tile),
                       batch(tile).results ? into(at, tile) : whole(at, tensor, arriving));
    });
    each([&](int64_t at, const Tile& tile) {
      if (!batch(tile).results)
        program_.combine(batch(tile).add, target(tile), whole(at, tensor, arriving), into(at, tile));
    });
    return work;
  }

 private:
  template <class Loop>
  void each(Loop&& loop) const {
    for (int64_t at = 0; at < tiles_.count(); ++at) loop(at, tiles_[at]);
  }
  const Batch& batch(const Tile& tile) const { return order_.batches[order_.batch[tile.index]]; }
  int64_t heads(const Tile& tile) const { return side_.heads_of(tile.group()); }
  int64_t target(const Tile& tile) const { return tile.returns_to < 0 ? tile.home : tiles_[tile.returns_to].dst; }
  // The edge by which the tile left its home.
  int64_t root(int64_t at) const {
    while (tiles_[at].parent >= 0) at = tiles_[at].parent;
    return at;
  }
  Operand at_home(const Tile& rows, const Tile& tile, Tensor tensor) const {
    return rows_of(tensor, low_.space(), rows.row, rows.rows, heads(tile));
  }
  Operand whole(int64_t at, Tensor tensor, const Growing<int64_t>& work) const {
    return rows_of(tensor, Space::WORK, work[at], tiles_[at].rows, heads(tiles_[at]));
  }

  // The first work rows of each tile's sums, held from before its first task until they are sent, and of its arriving
  // sums.
  std::pair<Growing<int64_t>, Growing<int64_t>> room() const {
    const bool holds = low_.holds();
    Growing<Lifetime> lifetimes;
    lifetimes.expect(2 * tiles_.count());
    for (const Tile& tile : tiles_) {
      const int64_t start = std::min(order_.clear[tile.round], order_.stage[low_.schedule.leads + tile.round]);
      lifetimes.push_back({tile.dst, tile.rows, start, holds ? program_.steps.count() : batch(tile).wait});
    }
    Growing<int64_t> order = adjacent_, base = kept_, work, arriving(tiles_.count());
    if (holds) {
      work = allot(lifetimes, order, base);
      each([&](int64_t at, const Tile& tile) { base[tile.dst] = std::max(base[tile.dst], work[at] + tile.rows); });
      lifetimes.clear(), order.clear();
    }
    const int64_t leaving_count = lifetimes.count();
    for (const Tile& tile : tiles_) lifetimes.push_back({target(tile), tile.rows, batch(tile).launch, batch(tile).add});
    for (const int64_t at : adjacent_)
      if (holds || !batch(tiles_[at]).results) order.push_back(leaving_count + at);
    Growing<int64_t> rows = allot(lifetimes, order, base);
    std::copy(rows.begin() + leaving_count, rows.end(), arriving.begin());
    rows.resize(static_cast<std::size_t>(leaving_count));
    return {holds ? std::move(work) : std::move(rows), std::move(arriving)};
  }

  Program& program_;
  const Lowering& low_;
  const Side& side_;
  const Growing<Tile>& tiles_;
  const Order& order_;
  Growing<int64_t> adjacent_, kept_;  // tile numbers, with tiles that arrive together adjacent; kept rows by group
};

}  // namespace

void clear_unopened(Program& program, int64_t step, const Sides& sides, Space space, bool backward) {
  const auto clear = [&](const Side& side, Tensor tensor) {
    const int64_t groups = side.heads.size();
    for (const ClearedRows& range : side.cleared)
      program.clear(step, range.lane / groups,
                    rows_of(tensor, space, range.row, range.rows, side.heads_of(range.lane % groups)));
  };
  clear(sides.queries, sums_of_queries(backward));
  if (backward) clear(sides.keys, Tensor::DKV);
}

void attend(Program& program, const Lowering& low, const Sides& sides, const Growing<int64_t>& steps, Space space,
            bool backward, const Places& queries, const Places& keys) {
  program.attention.expect(low.tasks.size());
  for (int64_t at = 0; at < low.tasks.size(); ++at) {
    const Task task = low.tasks[at];
    int64_t first = sides.queries.opening[at];
    Operand key_sums;
    if (backward) {
      first = FIRST_DQ * first + FIRST_DKV * sides.keys.opening[at];
      key_sums = sides.keys.of_task(at, Tensor::DKV, space, keys.summed);
    }
    program.attention.push_back(
        {narrow(task.exec), narrow(steps[at]), narrow(task.dmin), narrow(task.dmax), narrow(first),
         sides.queries.of_task(at, Tensor::Q, space, queries.fetched),
         sides.keys.of_task(at, Tensor::KV, space, keys.fetched),
         sides.queries.of_task(at, sums_of_queries(backward), space, queries.summed), key_sums});
  }
}

void lower_core(Program& program, const Lowering& low, bool backward, const Callbacks& between) {
  static constexpr std::array KEYS{Tensor::KV}, FORWARD{Tensor::Q};
  static constexpr std::array BACKWARD{Tensor::Q, Tensor::DO, Tensor::DELTA};
  const Sides sides = sides_of(low, backward);
  clear_unopened(program, program.step(Op::CLEAR), sides, low.space(), backward);
  const Order order = append_steps(program, low, sides, backward, between);
  Places queries, keys;
  if (!sides.keys.tiles.empty()) {
    Tiles tiles(program, low, sides.keys, order);
    keys.fetched = tiles.fetch(KEYS);
    if (backward) keys.summed = tiles.bring_back(Tensor::DKV);
  }
  if (!sides.queries.tiles.empty()) {
    Tiles tiles(program, low, sides.queries, order);
    queries.fetched = backward ? tiles.fetch(BACKWARD) : tiles.fetch(FORWARD);
    queries.summed = tiles.bring_back(sums_of_queries(backward));
  }
  Growing<int64_t> steps(low.tasks.size());
  for (int64_t task = 0; task < steps.count(); ++task) steps[task] = order.stage[low.stage[task]];
  attend(program, low, sides, steps, low.space(), backward, queries, keys);
}

}  // namespace apportion::lower
