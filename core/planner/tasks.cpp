// Cuts bands into attention tasks and finds the transfers (edges) that they need: apportion/planner/tasks.
//
//   bands     [bands, 6] global tokens: q0, q1, k0, k1, dmin, dmax
//   blocks    starts [blocks + 1], their first tokens; home, the rank of each; row, its first row there
//   cells     bands cut by (query block, key block), by band, then query block, then key block
//   tasks     cells by key block; query blocks that lie side by side and see all of the same keys are one
//   edges     (key block, rank) where some task needs keys that are not at home
#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>

#include "bind.hpp"
#include "ir/areas.hpp"
#include "ir/sorting.hpp"
#include "planner/edges.hpp"
#include "planner/numbers.hpp"

namespace apportion {

using std::int32_t;
using std::int64_t;

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
    for (int64_t one = 0; one < bands.rows(); ++one) {
      const Column<const int64_t> band = bands[one];
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

  // How many cells there are, which takes no longer where they are many.
  int64_t count() const {
    int64_t cells = 0;
    walk([&](auto, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t first, int64_t end) { cells += end - first; });
    return cells;
  }

  // Of each key block, how many cells come before its own; in the end, how many there are.
  std::vector<int64_t> before_keys() const {
    std::vector<int64_t> found(static_cast<std::size_t>(starts.size()) + 1);  // first of all: changes, from the next on
    walk([&](auto, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t first, int64_t end) {
      ++found[static_cast<std::size_t>(first) + 1];
      --found[static_cast<std::size_t>(end) + 1];
    });
    std::partial_sum(found.begin(), found.end(), found.begin());
    std::partial_sum(found.begin(), found.end(), found.begin());
    return found;
  }

  // Calls put(cell) for each.
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

// Tasks into the columns of `tasks`, which have room for one a cell; returns how many there are, and the edges. Until its
// last key is known, an edge has the keys [row, rows) that it brings.
std::pair<int64_t, std::vector<Edge>> find(const Bands& bands, std::vector<int64_t> place, Column<const int64_t> home,
                                           Column<const int64_t> row, int64_t ranks, Matrix<int32_t> tasks) {
  struct Rank {
    int64_t key = -1;   // block of keys that is being looked at
    int64_t edge = -1;  // what brings it
    int64_t last = -1;  // its last task that sees all of some keys
  };
  const Column<int32_t> task_row = tasks[1], task_rows = tasks[2], task_k0 = tasks[4], task_k1 = tasks[5];
  const Column<int32_t> task_dmax = tasks[7];
  const Column<const int64_t> starts = bands.starts;
  const int64_t count = place.back();
  const auto storage = std::make_unique_for_overwrite<Cell[]>(static_cast<std::size_t>(count));
  const Column<Cell> cells(storage.get(), count);  // by key block
  bands.cut([&](const Cell& cell) { cells[place[static_cast<std::size_t>(cell.k)]++] = cell; });
  std::vector<Rank> all(static_cast<std::size_t>(ranks));
  std::vector<Edge> edges;
  int64_t found = 0;
  for (const Cell& cell : cells) {
    const auto dst = narrow(home[cell.q]), rows = cell.q1 - cell.q0, src = narrow(home[cell.k]);
    const auto first = narrow(row[cell.q] + cell.q0 - starts[cell.q]);
    Rank& rank = all[static_cast<std::size_t>(dst)];
    if (rank.key != cell.k) {
      rank.key = cell.k;
      rank.edge = rank.last = -1;
      if (src != dst) {
        rank.edge = static_cast<int64_t>(edges.size());
        edges.push_back({cell.k, src, cell.k0, cell.k1, src, dst, -1, 0});
      }
    }
    if (rank.edge >= 0) {
      Edge& edge = edges[static_cast<std::size_t>(rank.edge)];
      edge.row = std::min(edge.row, cell.k0);
      edge.rows = std::max(edge.rows, cell.k1);
    }
    const bool full = cell.dmin == cell.k0 - cell.k1 + 1 && cell.dmax == rows - 1;
    const int64_t last = rank.last;
    if (full && last >= 0 && task_k0[last] == cell.k0 && task_k1[last] == cell.k1 &&
        task_row[last] + task_rows[last] == first) {
      task_rows[last] += rows;
      task_dmax[last] += rows;
      continue;
    }
    if (full) rank.last = found;
    const Task task{dst, first, rows, cell.k, cell.k0, cell.k1, cell.dmin, cell.dmax, narrow(rank.edge), -1, 0};
    write_column(task, found++, tasks);
  }
  for (Edge& edge : edges) {
    edge.rows -= edge.row;
    edge.row += narrow(row[edge.tile] - starts[edge.tile]);
  }
  return {found, std::move(edges)};
}

struct Span {
  int64_t row, token, rows;
};

// Spans of each rank, whose blocks are one after another in `order`. breaks: rising tokens at which a span ends. ptr:
// [ranks + 1].
std::vector<Span> cut_spans(Ints order, Column<const int64_t> starts, Column<const int64_t> home,
                            Column<const int64_t> breaks, Column<int64_t> ptr) {
  std::vector<Span> spans;
  std::fill(ptr.begin(), ptr.end(), 0);
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
    ptr[home[block] + 1] = static_cast<int64_t>(spans.size());
    before = block;
  }
  for (int64_t rank = 1; rank < ptr.size(); ++rank) ptr[rank] = std::max(ptr[rank], ptr[rank - 1]);
  return spans;
}

}  // namespace

void bind_tasks(nb::module_& m) {
  m.def("count_cells", [](In2<int64_t, "bands"> bands, In<int64_t, "starts"> starts) {
    return unlocked([&] { return Bands{bands, starts}.count(); });
  });

  m.def("cut_cells", [](In2<int64_t, "bands"> bands, In<int64_t, "starts"> starts) {
    const Bands given{bands, starts};
    New2<int32_t> columns(WIDTH<Cell>, given.count());
    unlocked([&] {
      int64_t at = 0;
      given.cut([&](const Cell& cell) { write_column(cell, at++, columns); });
    });
    return columns.array();
  });

  m.def("find", [](In2<int64_t, "bands"> bands, In<int64_t, "starts"> starts, In<int64_t, "home"> home,
                   In<int64_t, "row"> row, int64_t ranks) {
    const Bands given{bands, starts};
    std::vector<int64_t> place = given.before_keys();
    New2<int32_t> tasks(WIDTH<Task>, place.back());
    const auto [found, edges] = unlocked([&] { return find(given, std::move(place), home, row, ranks, tasks); });
    const nb::slice all{nb::none(), nb::none(), nb::none()};
    return nb::make_tuple(tasks.array()[nb::make_tuple(all, nb::slice(found))], columns_of(edges));
  });

  m.def("pairs", [](IntsIn<"rows"> rows, IntsIn<"keys"> keys, IntsIn<"dmin"> dmin, IntsIn<"dmax"> dmax) {
    New<int64_t> found(rows.size());
    unlocked([&] {
      for (int64_t band = 0; band < rows.size(); ++band)
        found[band] = area_of(0, rows[band], 0, keys[band], dmin[band], dmax[band]);
    });
    return found.array();
  });

  // The lowest `low` and the highest `high` of each number.
  m.def("hulls", [](IntsIn<"number"> number, IntsIn<"low"> low, IntsIn<"high"> high, int64_t count) {
    New<int64_t> first(count), last(count);
    unlocked([&] {
      std::fill(first.begin(), first.end(), int64_t{1} << 62);
      std::fill(last.begin(), last.end(), 0);
      for (int64_t at = 0; at < number.size(); ++at) {
        first[number[at]] = std::min(first[number[at]], low[at]);
        last[number[at]] = std::max(last[number[at]], high[at]);
      }
    });
    return nb::make_tuple(first.array(), last.array());
  });

  m.def("cut_spans", [](IntsIn<"order"> order, In<int64_t, "starts"> starts, In<int64_t, "home"> home,
                        In<int64_t, "breaks"> breaks, int64_t ranks) {
    New<int64_t> ptr(ranks + 1);
    const std::vector<Span> spans = unlocked([&] { return cut_spans(order, starts, home, breaks, ptr); });
    const auto count = static_cast<int64_t>(spans.size());
    New<int64_t> row(count), token(count), rows(count);
    for (int64_t at = 0; at < count; ++at) {
      const Span& span = spans[static_cast<std::size_t>(at)];
      row[at] = span.row, token[at] = span.token, rows[at] = span.rows;
    }
    return nb::make_tuple(ptr.array(), row.array(), token.array(), rows.array());
  });
}

}  // namespace apportion
