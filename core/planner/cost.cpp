// The times of attention tasks from the hardware's grids: see apportion/planner/cost.py.
//
//   pairs   causal pairs or fewer        causal ── pairs ──► full
//           one tile ──► causal grid     between the two grids           linear in between

#include "bind.hpp"

namespace apportion {

namespace {

// Divides integers as floats, like numpy.
double ratio(int64_t a, int64_t b) { return static_cast<double>(a) / static_cast<double>(b); }

int64_t causal_pairs(int64_t rows, int64_t keys) {
  const int64_t side = std::min(rows, keys);
  return rows * keys - side * (side - 1) / 2;
}

// The grids of a phase: `_PhaseCost` of cost.py. points: rows of the axis; cell, offset: by number of tiles; full,
// causal: [5, cells], the coefficients of c0 + c1 x + c2 y + c3 x y + c4 min(x, y).
struct Grids {
  Column<const int64_t> points, cell;
  Column<const double> offset;
  Matrix<const double> full, causal;
  int64_t tile;
  double pair_us, most_causal, window_us;

  double task_us(int64_t rows, int64_t keys, int64_t pairs) const {
    double time = full_us(rows, keys);
    // a single row or key is both full and causal, and gets the lower price
    if (pairs < rows * keys || std::min(rows, keys) == 1) time = part_us(time, rows, keys, pairs);
    return std::max(time, static_cast<double>(pairs) * pair_us);
  }

 private:
  double part_us(double whole, int64_t rows, int64_t keys, int64_t pairs) const {
    const int64_t causal_area = causal_pairs(rows, keys);
    const double limit = std::min(rows, keys) == 1 ? whole : whole * most_causal;
    const double time = std::min(causal_us(rows, keys), limit);
    if (pairs < causal_area) return sparse_us(time, rows, keys, pairs, causal_area);
    const double above = ratio(pairs - causal_area, std::max<int64_t>(rows * keys - causal_area, 1));
    return time + (whole - time) * std::clamp(above, 0.0, 1.0);
  }

  // Interpolates between a band one tile wide, the minimum that covers every row and key of a task, and the causal
  // band; adds the extra time for windows.
  double sparse_us(double time, int64_t rows, int64_t keys, int64_t pairs, int64_t causal_area) const {
    const double floor = std::min(std::max(full_us(rows, 1), full_us(1, keys)), time);
    const int64_t narrowest = std::max(rows, keys);
    const double share = ratio(pairs - narrowest, std::max<int64_t>(causal_area - narrowest, 1));
    return floor + (time - floor) * std::clamp(share, 0.0, 1.0) + static_cast<double>(rows) * window_us;
  }

  double full_us(int64_t rows, int64_t keys) const {
    const double time = time_on(full, rows, keys, false);
    if (!is_beyond(rows, keys)) return time;
    return time * ratio(seen(rows) * seen(keys), on_axis(rows) * on_axis(keys));
  }
  double causal_us(int64_t rows, int64_t keys) const {
    const double time = time_on(causal, rows, keys, true);
    if (!is_beyond(rows, keys)) return time;
    return time * ratio(causal_pairs(seen(rows), seen(keys)), causal_pairs(on_axis(rows), on_axis(keys)));
  }

  double time_on(const Matrix<const double>& c, int64_t rows, int64_t keys, bool bends) const {
    const int64_t i = tiles(rows), j = tiles(keys), at = cell[i] * (points.size() - 1) + cell[j];
    const double x = offset[i], y = offset[j];
    const double time = c[0][at] + c[1][at] * x + (c[2][at] + c[3][at] * x) * y;
    return bends ? time + c[4][at] * std::min(x, y) : time;
  }
  int64_t tiles(int64_t rows) const { return std::min((rows + tile - 1) / tile, cell.size() - 1); }

  // The last point of the axis; `seen` rounds rows up to tiles, `on_axis` also clips them to the axis.
  int64_t last() const { return points[points.size() - 1]; }
  bool is_beyond(int64_t rows, int64_t keys) const { return std::max(rows, keys) > last(); }
  int64_t seen(int64_t rows) const { return std::max((rows + tile - 1) / tile * tile, points[0]); }
  int64_t on_axis(int64_t rows) const { return std::min(seen(rows), last()); }
};

// The time of each task; columns of one number are broadcast. q_row_us, kv_row_us: to read and write a row of one head.
Array<double> task_us(const Grids& phase, double scale, double q_row_us, double kv_row_us,
                      const std::vector<Column<const int64_t>>& columns) {
  int64_t count = 1;
  for (const Column<const int64_t>& column : columns)
    if (column.size() != 1) count = column.size();
  for (const Column<const int64_t>& column : columns)
    if (column.size() != 1 && column.size() != count) throw std::invalid_argument("columns differ in length");
  Array<double> times(count);
  for (int64_t i = 0; i < count; ++i) {
    const auto value = [&](std::size_t column) { return columns[column][columns[column].size() == 1 ? 0 : i]; };
    const int64_t rows = value(0), keys = value(1), heads = value(3);
    const double time = phase.task_us(rows, keys, value(2)) * scale * static_cast<double>(heads);
    const double move_us = static_cast<double>(rows * heads) * q_row_us;
    times[i] = std::max(time, move_us + static_cast<double>(keys * value(4)) * kv_row_us);
  }
  return times;
}

}  // namespace

static const Area area("cost", [](nb::module_& m) {
  def(m, "task_us(phase, scale, q_row_us, kv_row_us, columns)", task_us);
});

}  // namespace apportion
