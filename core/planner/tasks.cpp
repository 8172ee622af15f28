// Cuts bands into attention tasks and finds the transfers (edges) that they need: apportion/planner/tasks.
//
//   bands     [bands, 6] global tokens: q0, q1, k0, k1, dmin, dmax
//   blocks    starts [blocks + 1], their first tokens; home, the rank of each; row, the first row of each there
//   cells     bands cut by (query block, key block), by band, then query block, then key block
//   tasks     cells by key block; adjacent query blocks that all see the same keys in full are one task
//   edges     (key block, rank) if some task of the rank needs keys of the block and the block is not at home there

#include "bind.hpp"
#include "ir/areas.hpp"
#include "ir/sorting.hpp"
#include "planner/numbers.hpp"

namespace apportion {

namespace {

struct Cell {
  int32_t q, k, q0, q1, k0, k1, dmin, dmax;
};

struct Task {
  int32_t exec, row, rows, k, k0, k1, dmin, dmax, edge, query_edge, group;
};

struct Bands {
  Matrix<const int64_t> bands;
  Column<const int64_t> starts;

  int64_t block_of(int64_t token) const {
    const int64_t after = std::upper_bound(starts.begin(), starts.end(), token) - starts.begin();
    return std::max<int64_t>(after - 1, 0);
  }

  // Calls each(band, query block, rows of the band in it, the keys that they see, key blocks [first, end) of these).
  template <class Each>
  void walk(Each&& each) const {
    const int64_t blocks = starts.size() - 1;
    for (int64_t i = 0; i < bands.rows(); ++i) {
      const Column<const int64_t> band = bands[i];
      int64_t key = block_of(band[2]);
      for (int64_t block = block_of(band[0]); block < blocks && starts[block] < band[1]; ++block) {
        const int64_t q0 = std::max(band[0], starts[block]), q1 = std::min(band[1], starts[block + 1]);
        const int64_t k0 = std::max(band[2], q0 - band[5]), k1 = std::min(band[3], q1 - band[4]);
        if (q0 >= q1 || k0 >= k1) continue;
        while (starts[key + 1] <= k0) ++key;
        const int64_t end = std::lower_bound(starts.begin(), starts.end(), k1) - starts.begin();
        each(band, block, q0, q1, k0, k1, key, std::min(end, blocks));
      }
    }
  }

  // For each key block, the number of cells of earlier key blocks; at the end, the number of all cells. Found without
  // visiting each cell.
  Growing<int64_t> before_keys() const {
    Growing<int64_t> counts(starts.size() + 1);  // at first: differences, shifted by one
    walk([&](auto, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t first, int64_t end) {
      ++counts[first + 1];
      --counts[end + 1];
    });
    std::partial_sum(counts.begin(), counts.end(), counts.begin());
    std::partial_sum(counts.begin(), counts.end(), counts.begin());
    return counts;
  }

  // Calls put(cell) for each cell.
  template <class Put>
  void cut(Put&& put) const {
    walk([&](Column<const int64_t> band, int64_t block, int64_t q0, int64_t q1, int64_t k0, int64_t k1, int64_t first,
             int64_t end) {
      for (int64_t key = first; key < end; ++key) {
        const int64_t a = std::max(k0, starts[key]), b = std::min(k1, starts[key + 1]);
        put(Cell{narrow(block), narrow(key), narrow(q0), narrow(q1), narrow(a), narrow(b),
                 narrow(std::max(band[4] - (q0 - a), a - b + 1)), narrow(std::min(band[5] - (q0 - a), q1 - q0 - 1))});
      }
    });
  }
};

// Until all its keys are known, an edge's `row` and `rows` are the begin and end of the keys that it brings.
std::pair<Growing<Task>, Growing<Edge>> find(const Bands& bands, Column<const int64_t> home, Column<const int64_t> row,
                                             int64_t ranks) {
  struct Rank {
    int64_t key = -1;   // the current block of keys
    int64_t edge = -1;  // the edge that brings this block
    int64_t last = -1;  // its last task that sees all of some keys
  };
  const Column<const int64_t> starts = bands.starts;
  Growing<int64_t> place = bands.before_keys();
  const Array<Cell> cells(place.back());  // by key block
  bands.cut([&](const Cell& cell) { cells[place[cell.k]++] = cell; });
  const Array<Rank> all(ranks);
  Growing<Edge> edges;
  Growing<Task> tasks;
  tasks.expect(cells.size());
  for (const Cell& cell : cells) {
    const auto dst = narrow(home[cell.q]), rows = cell.q1 - cell.q0, src = narrow(home[cell.k]);
    const auto first = narrow(row[cell.q] + cell.q0 - starts[cell.q]);
    Rank& rank = all[dst];
    if (rank.key != cell.k) {
      rank.key = cell.k;
      rank.edge = rank.last = -1;
      if (src != dst) {
        rank.edge = edges.count();
        edges.push_back({cell.k, src, cell.k0, cell.k1, src, dst, -1, 0});
      }
    }
    if (rank.edge >= 0) {
      Edge& edge = edges[rank.edge];
      edge.row = std::min(edge.row, cell.k0);
      edge.rows = std::max(edge.rows, cell.k1);
    }
    const bool full = cell.dmin == cell.k0 - cell.k1 + 1 && cell.dmax == rows - 1;
    if (full && rank.last >= 0) {
      Task& last = tasks[rank.last];
      if (last.k0 == cell.k0 && last.k1 == cell.k1 && last.row + last.rows == first) {
        last.rows += rows;
        last.dmax += rows;
        continue;
      }
    }
    if (full) rank.last = tasks.count();
    tasks.push_back({dst, first, rows, cell.k, cell.k0, cell.k1, cell.dmin, cell.dmax, narrow(rank.edge), -1, 0});
  }
  for (Edge& edge : edges) {
    edge.rows -= edge.row;
    edge.row += narrow(row[edge.tile] - starts[edge.tile]);
  }
  return {std::move(tasks), std::move(edges)};
}

struct Span {
  int64_t row, token, rows;
};

// The first span of each rank, and the spans of the blocks in `order`, one after another. breaks: ascending tokens at
// which a span ends.
std::pair<Array<int64_t>, Growing<Span>> cut_spans(Ints order, Column<const int64_t> starts, Column<const int64_t> home,
                                                   Column<const int64_t> breaks, int64_t ranks) {
  Growing<Span> spans;
  Array<int64_t> ptr(ranks + 1);
  int64_t row = 0, before = -1;
  for (int64_t at = 0; at < order.size(); ++at) {
    const int64_t block = order[at], first = starts[block], end = starts[block + 1];
    const bool fresh = before < 0 || home[before] != home[block];
    if (fresh) row = 0;
    const int64_t* cut = std::lower_bound(breaks.begin(), breaks.end(), first);
    if (fresh || before + 1 != block) {
      spans.push_back({row, first, 0});
      if (cut != breaks.end() && *cut == first) ++cut;
    }
    for (int64_t from = first; from < end;) {  // to the next break
      const int64_t to = cut == breaks.end() ? end : std::min(*cut, end);
      spans.back().rows += to - from;
      if (to < end) {
        spans.push_back({row + to - first, to, 0});
        ++cut;
      }
      from = to;
    }
    row += end - first;
    ptr[home[block] + 1] = spans.count();
    before = block;
  }
  for (int64_t rank = 1; rank < ptr.size(); ++rank) ptr[rank] = std::max(ptr[rank], ptr[rank - 1]);
  return {std::move(ptr), std::move(spans)};
}

Array<int64_t> pairs(Ints rows, Ints keys, Ints dmin, Ints dmax) {
  Array<int64_t> totals(rows.size());
  for (int64_t band = 0; band < rows.size(); ++band)
    totals[band] = area_of(0, rows[band], 0, keys[band], dmin[band], dmax[band]);
  return totals;
}

}  // namespace

static const Area area("tasks", [](nb::module_& m) {
  def(m, "count_cells(bands)", +[](const Bands& bands) { return bands.before_keys().back(); });
  def(m, "cut_cells(bands)", +[](const Bands& bands) {
    Growing<Cell> cells;
    cells.expect(bands.before_keys().back());
    bands.cut([&](const Cell& cell) { cells.push_back(cell); });
    return cells;
  });
  def(m, "find(bands, home, row, ranks)", find);
  def(m, "pairs(rows, keys, dmin, dmax)", pairs);
  def(m, "cut_spans(order, starts, home, breaks, ranks)", cut_spans);
});

}  // namespace apportion
