// Memory traffic of instructions in bytes.
#include <algorithm>

#include "bind.hpp"
#include "ir/sorting.hpp"
#include "planner/scratch.hpp"

namespace apportion {

using std::int64_t;

namespace {

constexpr int64_t FIRST = 4;  // the column of list `rowops` behind its operands

// Bytes of the operands of each instruction's row operations, as often as they are read or written. of: where the
// operands of the instruction's rank begin; passes: by whether the row is the first into a sum, and by op.
void row_bytes(Ints op, Ints count, Column<const int64_t> of, IntRows rows, Column<const int64_t> bytes,
               Matrix<const int64_t> passes, Column<int64_t> moved) {
  const int64_t codes = passes.rows() / 2;
  int64_t row = 0;
  for (int64_t at = 0; at < moved.size(); ++at) {
    moved[at] = 0;
    const Column<const int64_t> usual = passes[op[at]];
    if (std::all_of(usual.begin(), usual.end(), [](int64_t times) { return times == 0; })) continue;
    for (const int64_t end = row + count[at]; row < end; ++row) {
      const Column<const int64_t> times = passes[rows[FIRST][row] * codes + op[at]];
      for (int64_t operand = 0; operand < FIRST; ++operand)
        moved[at] += times[operand] * bytes[of[at] + rows[operand][row]];
    }
  }
}

// Ranges [row0, row1) of rows of accumulators that tasks use. task: of each range.
struct Ranges {
  Column<const int64_t> task, row0, row1;
};

// Of tasks: the instruction, which rows are numbered alike, heads of the accumulator.
struct Tasks {
  Column<const int64_t> instruction, lane, heads;
};

// Adds the size of every row of an instruction and lane that is in any of the ranges to what the instruction moves,
// once. size: bytes of a row of one head.
void add_rows(const Ranges& ranges, const Tasks& tasks, int64_t size, Column<int64_t> moved) {
  const int64_t count = ranges.task.size();
  if (count == 0) return;
  const int64_t lanes = *std::max_element(tasks.lane.begin(), tasks.lane.end()) + 1;
  const int64_t span = *std::max_element(ranges.row0.begin(), ranges.row0.end()) + 1;
  Scratch<int64_t> keys(count), order(count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t task = ranges.task[i];
    keys[i] = (tasks.instruction[task] * lanes + tasks.lane[task]) * span + ranges.row0[i];
  }
  stable_order(keys, order);
  int64_t stream = -1, reach = 0;
  for (const int64_t i : order) {
    if (keys[i] / span != stream) reach = 0;
    stream = keys[i] / span;
    const int64_t task = ranges.task[i], rows = std::max<int64_t>(ranges.row1[i] - std::max(ranges.row0[i], reach), 0);
    moved[tasks.instruction[task]] += size * tasks.heads[task] * rows;
    reach = std::max(reach, ranges.row1[i]);
  }
}

}  // namespace

void bind_durations(nb::module_& m) {
  m.def("row_bytes", [](IntsIn<"op"> op, IntsIn<"count"> count, In<int64_t, "of"> of, IntsIn2<"rows"> rows,
                        In<int64_t, "bytes"> bytes, In2<int64_t, "passes"> passes) {
    New<int64_t> moved(op.size());
    unlocked([&] { row_bytes(op, count, of, rows, bytes, passes, moved); });
    return moved.array();
  });
  m.def("add_rows", [](Out<int64_t, "moved"> moved, In<int64_t, "task"> task, In<int64_t, "row0"> row0,
                       In<int64_t, "row1"> row1, In<int64_t, "instruction"> instruction, In<int64_t, "lane"> lane,
                       In<int64_t, "heads"> heads, int64_t size) {
    unlocked([&] { add_rows({task, row0, row1}, {instruction, lane, heads}, size, moved); });
  });
}

}  // namespace apportion
