// Stages of tasks, and merging of tasks within a stage: apportion/planner/lower/stages.py.
//
//   step      rank * stages + stage
//   merged    tasks of one step with the same query rows whose keys are adjacent in a tile, in adjacent tiles, or at
//             home, and form one band: the `first` of them, their number of keys, and `low`, the lowest diagonal
//   parts     for each merged task, the keys of the tasks that it joins

#include "bind.hpp"
#include "ir/sorting.hpp"

namespace apportion {

namespace {

constexpr int64_t COLUMNS = 11;  // of `Tasks`

struct Tasks {
  using Given = std::vector<Ints>;
  explicit Tasks(const Given& given)
      : columns(given), rank(given[0]), row(given[1]), rows(given[2]), k(given[3]), k0(given[4]), k1(given[5]),
        dmin(given[6]), dmax(given[7]), edge(given[8]) {}

  Given columns;
  Ints rank, row, rows, k, k0, k1, dmin, dmax, edge;

  int64_t size() const { return rank.size(); }
  int64_t keys(int64_t task) const { return k1[task] - k0[task]; }
};

enum : int64_t { ROW = 1, ROWS = 2, K0 = 4, K1 = 5, DMIN = 6, DMAX = 7 };  // columns of results

struct Edges {
  Ints tile, row, rows, dst, lane, round;
};

// How the work of ranks is divided into stages. share: [stages], the share of each; visit: the stages in the order in
// which they are filled: the first `apart` each to its own share, the others cumulatively.
struct Filling {
  Column<const double> share;
  Column<const int64_t> visit;
  int64_t apart;
};

// Assigns the tasks without an edge to stages, in `order`: each gets the stage of its rank's previous task, or the next
// one, in the order of `visit`, once the rank's work in the stages visited so far reaches their share.
void fill(Column<int32_t> stage, Ints rank, Ints edge, Column<const int64_t> work, int64_t ranks,
          const Filling& filling, Column<const int64_t> order) {
  struct Rank {
    int64_t total = 0, done = 0, position = 0;
  };
  const int64_t stages = filling.share.size();
  const Array2<int64_t> load(ranks, stages);
  const Array<Rank> all(ranks);
  for (int64_t task = 0; task < rank.size(); ++task) {
    all[rank[task]].total += work[task];
    if (edge[task] >= 0) load[rank[task]][stage[task]] += work[task];
  }
  Growing<double> due;
  for (const int64_t i : filling.visit) due.push_back((due.empty() ? 0.0 : due.back()) + filling.share[i]);
  for (int64_t i = 0; i < ranks; ++i) all[i].done = load[i][filling.visit[0]];
  for (const int64_t task : order) {
    if (edge[task] >= 0) continue;
    Rank& current = all[rank[task]];
    const Column<int64_t> loads = load[rank[task]];
    const auto total = static_cast<double>(current.total);
    const auto is_full = [&] {
      const int64_t at = filling.visit[current.position];
      if (current.position < filling.apart) return static_cast<double>(loads[at]) >= total * filling.share[at];
      return static_cast<double>(current.done) >= total * due[current.position];
    };
    while (current.position < filling.visit.size() - 1 && is_full()) current.done += loads[filling.visit[++current.position]];
    const int64_t at = filling.visit[current.position];
    stage[task] = static_cast<int32_t>(at);
    current.done += work[task];
    loads[at] += work[task];
  }
}

// Cuts tasks into strips: `parts` equal ones per task, followed by two strips of `tail` rows unless that is 0; each
// strip has the keys that its rows see.
Array2<int32_t> cut(const Tasks& tasks, Column<const int64_t> parts, Column<const int64_t> tails) {
  int64_t strips = 0;
  for (int64_t task = 0; task < tasks.size(); ++task) strips += parts[task] + 2 * (tails[task] > 0);
  Array2<int32_t> out(COLUMNS, strips);
  const auto put = [&](int64_t column, int64_t at, int64_t value) { out[column][at] = static_cast<int32_t>(value); };
  int64_t at = 0;
  for (int64_t task = 0; task < tasks.size(); ++task) {
    const int64_t whole = parts[task], tail = tails[task], count = whole + 2 * (tail > 0);
    for (int64_t column = 0; column < COLUMNS; ++column) {
      const auto value = static_cast<int32_t>(tasks.columns[static_cast<std::size_t>(column)][task]);
      std::fill_n(out[column].begin() + at, count, value);
    }
    if (count == 1) {
      ++at;
      continue;
    }
    const int64_t dmin = tasks.dmin[task], dmax = tasks.dmax[task], body = tasks.rows[task] - 2 * tail;
    const auto begin = [&](int64_t strip) {
      return body * std::min(strip, whole) / whole + tail * std::max<int64_t>(strip - whole, 0);
    };
    for (int64_t strip = 0; strip < count; ++strip, ++at) {
      const int64_t low = begin(strip), high = begin(strip + 1);
      const int64_t first = std::max<int64_t>(low - dmax, 0), last = std::min(high - dmin, tasks.keys(task));
      const int64_t shift = low - first;  // the diagonals of the strip are this much lower
      put(ROW, at, tasks.row[task] + low);
      put(ROWS, at, high - low);
      put(K0, at, tasks.k0[task] + first);
      put(K1, at, tasks.k0[task] + last);
      put(DMIN, at, std::max(dmin - shift, 1 - (last - first)));
      put(DMAX, at, std::min(dmax - shift, high - low - 1));
    }
  }
  return out;
}

// For each edge, the edge whose tile arrives together with its tile and follows it, -1 if there is none. Tiles that
// arrive together lie in the order of their numbers.
Array<int32_t> following(const Edges& edges, int64_t ranks) {
  const int64_t count = edges.dst.size();
  const auto order = ordered<int32_t>(count, [&](int64_t a, int64_t b) { return edges.tile[a] < edges.tile[b]; });
  Array<int32_t> after(count, -1);
  int64_t rounds = 1;
  for (int64_t edge = 0; edge < count; ++edge) rounds = std::max(rounds, edges.round[edge] + 1);
  const Array<int32_t> last(2 * ranks * rounds, -1);
  for (const int32_t edge : order) {
    int32_t& before = last[2 * (edges.dst[edge] * rounds + edges.round[edge]) + (edges.lane[edge] & 1)];
    if (before >= 0) after[before] = edge;
    before = edge;
  }
  return after;
}

struct MergedTask {
  int32_t first, step;
  int64_t count, low;
};

class TaskMerger {
 public:
  // query: for each task, a number for its first query row, equal only for the same row; shift: for each block, the
  // offset from tokens to rows.
  TaskMerger(const Tasks& tasks, Column<const int32_t> stage, int64_t stages, int64_t ranks, Ints query,
          Column<const int64_t> shift, const Edges& edges)
      : tasks_(tasks), edges_(edges), after_(following(edges, ranks)) {
    int64_t largest = 0;
    for (int64_t task = 0; task < tasks.size(); ++task) {
      step_[task] = static_cast<int32_t>(tasks.rank[task] * stages + stage[task]);
      row_[task] = shift[tasks.k[task]] + tasks.k0[task];
      if (tasks.edge[task] >= 0) row_[task] -= edges.row[tasks.edge[task]];
      largest = std::max(largest, query[task]);
    }
    counting_order<Column<int32_t>, int32_t>(step_, ranks * stages, by_step_);
    const Array<int32_t> last(largest + 1, -1);  // the last task of each query row, in any step
    for (const int32_t task : by_step_) {
      const int32_t before = std::exchange(last[query[task]], task);
      if (!joins(before, task)) {
        into_[task] = static_cast<int32_t>(merged_.size());
        merged_.push_back({task, step_[task], tasks.keys(task), tasks.dmin[task]});
      }
    }
    sort();
  }

  // The merged tasks in the order of a program, the ranges of keys of each, and the stage of each.
  auto result(Column<const int32_t> stage) const {
    Array2<int32_t> columns(COLUMNS, order_.count());
    Array<int32_t> stage_of(order_.count());
    for (int64_t column = 0; column < COLUMNS; ++column)
      for (int64_t at = 0; at < order_.count(); ++at)
        columns[column][at] = static_cast<int32_t>(tasks_.columns[static_cast<std::size_t>(column)][merged_at(at).first]);
    for (int64_t at = 0; at < order_.count(); ++at) {
      columns[K1][at] = columns[K0][at] + static_cast<int32_t>(merged_at(at).count);
      columns[DMIN][at] = static_cast<int32_t>(merged_at(at).low);
      stage_of[at] = stage[merged_at(at).first];
    }
    return std::tuple(std::move(columns), parts(), std::move(stage_of));
  }

 private:
  // The parts, sorted by merged task in the order of the program, and within each in the order in which they join: the
  // number of the merged task, the edge, the first row, and the number of keys of each.
  std::tuple<Array<int32_t>, Array<int32_t>, Array<int64_t>, Array<int32_t>> parts() const {
    const int64_t count = tasks_.size();
    Array<int32_t> owner(count), edge(count), keys(count), number(order_.count()), place(order_.count() + 1);
    Array<int64_t> row(count);
    for (int64_t at = 0; at < order_.count(); ++at) number[order_[at]] = static_cast<int32_t>(at);
    for (const int32_t merged : into_) ++place[number[merged] + 1];
    std::partial_sum(place.begin(), place.end(), place.begin());
    for (const int32_t task : by_step_) {
      const int32_t merged = number[into_[task]], at = place[merged]++;
      owner[at] = merged;
      edge[at] = static_cast<int32_t>(tasks_.edge[task]);
      keys[at] = static_cast<int32_t>(tasks_.keys(task));
      row[at] = row_[task];
    }
    return moved(owner, edge, row, keys);
  }
  const MergedTask& merged_at(int64_t place) const { return merged_[order_[place]]; }

  // Joins a task to the merged task of an earlier one, if possible.
  bool joins(int64_t before, int64_t task) {
    if (before < 0) return false;
    const int64_t rows = tasks_.rows[task], edge = tasks_.edge[task], last = tasks_.edge[before];
    if (step_[before] != step_[task] || tasks_.rows[before] != rows) return false;
    const int64_t end = row_[before] + tasks_.keys(before);
    const bool adjacent = last == edge ? end == row_[task]
                                   : last >= 0 && edge >= 0 && after_[last] == edge && row_[task] == 0 && end == edges_.rows[last];
    MergedTask& part = merged_[into_[before]];
    // one band over both: the same diagonals, or edges of the band that lie outside the parts
    const int64_t begin = tasks_.dmin[task] - part.count;
    const bool same = begin == part.low || (part.low == 1 - part.count && begin <= part.low);
    if (!adjacent || !same || tasks_.dmax[task] != std::min(tasks_.dmax[part.first] + part.count, rows - 1)) return false;
    part.low = begin;
    part.count += tasks_.keys(task);
    into_[task] = into_[before];
    return true;
  }

  // The order of a program: in each step, first the tasks whose band is not full, those with the most rows first.
  void sort() {
    order_.resize(merged_.size());
    std::iota(order_.begin(), order_.end(), 0);
    const auto is_cut = [&](int64_t a) {
      const MergedTask& task = merged_[a];
      return task.low > 1 - task.count || tasks_.dmax[task.first] < tasks_.rows[task.first] - 1;
    };
    const auto longer = [&](int64_t a, int64_t b) {
      return tasks_.rows[merged_[a].first] > tasks_.rows[merged_[b].first];
    };
    for (auto begin = order_.begin(), end = begin; begin != order_.end(); begin = end) {
      while (end != order_.end() && merged_[*end].step == merged_[*begin].step) ++end;
      std::stable_sort(begin, std::stable_partition(begin, end, is_cut), longer);
    }
  }

  const Tasks& tasks_;
  const Edges& edges_;
  Array<int32_t> step_{tasks_.size()}, into_{tasks_.size()}, by_step_{tasks_.size()}, after_;
  Growing<int32_t> order_;
  Array<int64_t> row_{tasks_.size()};  // the first key row, in its tile or at home
  Growing<MergedTask> merged_;
};

}  // namespace

static const Area area("stages", [](nb::module_& m) {
  def(m, "fill(stage, rank, edge, work, ranks, filling, order)", fill);
  def(m, "cut(tasks, parts, tails)", cut);
  def(m, "merge(tasks, stage, stages, ranks, query, shift, edges)",
      +[](const Tasks& tasks, Column<const int32_t> stage, int64_t stages, int64_t ranks, Ints query,
          Column<const int64_t> shift, const Edges& edges) {
        return TaskMerger(tasks, stage, stages, ranks, query, shift, edges).result(stage);
      });
});

}  // namespace apportion
