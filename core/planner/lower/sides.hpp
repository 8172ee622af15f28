// The rows of one side of a kind's tasks, queries or keys: at home, and in tiles for remote tasks.
#pragma once

#include "owned.hpp"
#include "planner/lower/given.hpp"
#include "planner/lower/program.hpp"

namespace apportion::lower {

// Rows to which a task adds, in a lane: one rank's rows or one tile, with some of the heads. may_open: whether only
// earlier tasks can have changed their initial state, so that this task may open them.
struct WrittenRows {
  int32_t task, lane, row, rows;
  bool may_open;
};

struct ClearedRows {
  int64_t lane, row, rows;
};

// flags: 1 for tasks that overwrite. cleared: the rows that no such task initializes, in maximal ranges.
struct Openers {
  Growing<int32_t> flags;
  Growing<ClearedRows> cleared;
};

// written: in task order, with disjoint ranges per task; held: the number of rows of each lane.
Openers find_openers(const Growing<WrittenRows>& written, const Growing<int64_t>& held, int64_t tasks);

// An edge of one side. parent, returns_to: numbers of tiles of the side; index: its position among the edges of both
// sides. `round` brings the tile. The sums of its tasks may leave after the stage of round `back`, and are added to the
// tile `returns_to` or, if that is -1, to home rows.
struct Tile : Edge {
  int32_t index, round, back, returns_to;

  int32_t group() const { return lane >> 1; }
};

// The rows of a task on one side, in a tile or, for -1, at home. row: in attention order of the rows' home.
struct TaskRows {
  int32_t tile, group, row, rows;
};

// heads: the head set of each head group of the side. opening: 1 for tasks that overwrite their accumulator rows.
// cleared, tiles_cleared: rows that no task overwrites; their lanes are rank * groups + group, and tiles.
struct Side {
  Growing<Tile> tiles;
  Growing<TaskRows> used;
  Ints heads;
  Growing<int32_t> opening;
  Growing<ClearedRows> cleared, tiles_cleared;

  int64_t heads_of(int64_t group) const { return heads.size() == 1 ? 0 : heads[group]; }
  // The rows of a task. work: the first work row of each tile.
  Operand of_task(int64_t task, Tensor tensor, Space space, const Growing<int64_t>& work) const {
    const TaskRows& range = used[task];
    if (range.tile < 0) return rows_of(tensor, space, range.row, range.rows, heads_of(range.group));
    const int64_t row = work[range.tile] + range.row - tiles[range.tile].row;
    return rows_of(tensor, Space::WORK, row, range.rows, heads_of(range.group));
  }
  // The rows of tile `inner` in tile `outer`.
  Operand inside(int64_t inner, int64_t outer, Tensor tensor, const Growing<int64_t>& work) const {
    const Tile& tile = tiles[inner];
    return rows_of(tensor, Space::WORK, work[outer] + tile.row - tiles[outer].row, tile.rows, heads_of(tile.group()));
  }
};

struct Sides {
  Side queries, keys;
};

// keys_open: whether tasks accumulate gradients of keys.
Sides sides_of(const Lowering& low, bool keys_open);

}  // namespace apportion::lower
