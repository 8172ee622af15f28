// First task on each range of accumulator rows, which overwrites them: apportion/planner/lower/first_writes.py.
//
//   points    of each lane, 0, where rows of parts begin and end, and its end
//   pieces    from a point to the next: rows that the same parts have
//   state     of each piece, whether the first task that reaches it opens it, once tasks are visited in their order
#include <algorithm>
#include <numeric>
#include <utility>

#include "bind.hpp"

namespace apportion {

using std::int32_t;
using std::int64_t;
using Points = std::vector<int64_t>;

namespace {

struct Written {
  Ints task, lane, row, rows;
  Column<const bool> may;
};

// low, high: of each part, its first piece and the last + 1.
struct Pieces {
  Points points, ptr;
  std::vector<int32_t> low, high;
};

enum class State : std::uint8_t { UNSEEN, ADDED, OPENED };

struct Openers {
  std::vector<int32_t> flags;
  std::vector<int64_t> lane, row, rows;
};

constexpr std::ptrdiff_t FEW = 64;  // points of a lane that are kept rising as they are found

void add(Points& points, std::ptrdiff_t first, int64_t point) {
  const auto begin = points.begin() + first;
  if (points.end() - begin > FEW) {
    points.push_back(point);
    return;
  }
  const auto at = std::lower_bound(begin, points.end(), point);
  if (at == points.end() || *at != point) points.insert(at, point);
}

// Parts by their lane, and where those of each begin.
struct ByLane {
  std::vector<int32_t> order;
  std::vector<int64_t> begin;

  ByLane(Ints lane, std::size_t lanes) : begin(lanes + 2) {
    for (int64_t part = 0; part < lane.size(); ++part)
      if (lane[part] >= 0) ++begin[static_cast<std::size_t>(lane[part]) + 2];
    std::partial_sum(begin.begin(), begin.end(), begin.begin());
    order.resize(static_cast<std::size_t>(begin.back()));
    for (int32_t part = 0; part < lane.size(); ++part)
      if (lane[part] >= 0) order[static_cast<std::size_t>(begin[static_cast<std::size_t>(lane[part]) + 1]++)] = part;
  }
  Column<const int32_t> of(std::size_t lane) const {
    return {order.data() + begin[lane], begin[lane + 1] - begin[lane]};
  }
};

Pieces cut(const Written& written, Column<const int64_t> held) {
  const auto parts = static_cast<std::size_t>(written.lane.size()), lanes = static_cast<std::size_t>(held.size());
  const ByLane by_lane(written.lane, lanes);
  Pieces found{{}, {0}, std::vector<int32_t>(parts), std::vector<int32_t>(parts)};
  Points& points = found.points;
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    const std::ptrdiff_t first = found.ptr.back();
    const int64_t end = held[static_cast<int64_t>(lane)];
    points.push_back(0);
    if (end != 0) points.push_back(end);
    for (const int32_t part : by_lane.of(lane)) {
      const int64_t row = written.row[part], rows = written.rows[part];
      if (row == 0 && rows == end) continue;  // few have not all of a tile
      add(points, first, row);
      add(points, first, row + rows);
    }
    if (static_cast<std::ptrdiff_t>(points.size()) - first > FEW) {
      std::sort(points.begin() + first, points.end());
      points.erase(std::unique(points.begin() + first, points.end()), points.end());
    }
    const auto index = [&](int64_t point) {
      const auto behind = std::upper_bound(points.begin() + first + 1, points.end(), point);
      return static_cast<int32_t>(behind - points.begin() - 1);
    };
    for (const int32_t part : by_lane.of(lane)) {
      found.low[static_cast<std::size_t>(part)] = index(written.row[part]);
      found.high[static_cast<std::size_t>(part)] = index(written.row[part] + written.rows[part]);
    }
    found.ptr.push_back(static_cast<int64_t>(points.size()));
  }
  return found;
}

// Pieces that no task has reached yet: of each piece the next of these from it on, or a step towards it.
class Unseen {
 public:
  explicit Unseen(std::size_t pieces) : after_(pieces + 1) { std::iota(after_.begin(), after_.end(), 0); }
  bool has(int64_t piece) const { return after_[static_cast<std::size_t>(piece)] == piece; }
  void remove(int64_t piece) { after_[static_cast<std::size_t>(piece)] = piece + 1; }
  int64_t next(int64_t piece) {
    int64_t found = piece;
    while (!has(found)) found = after_[static_cast<std::size_t>(found)];
    while (after_[static_cast<std::size_t>(piece)] != found)
      piece = std::exchange(after_[static_cast<std::size_t>(piece)], found);
    return found;
  }

 private:
  std::vector<int64_t> after_;
};

// Sets the flags of tasks that open all that they reach; returns the state of pieces.
std::vector<State> visit(const Written& written, const Pieces& pieces, std::vector<int32_t>& flags) {
  std::vector<State> state(pieces.points.size(), State::UNSEEN);
  Unseen unseen(state.size());
  for (int64_t begin = 0, end; begin < written.task.size(); begin = end) {
    bool fresh = true, some = false;
    for (end = begin; end < written.task.size() && written.task[end] == written.task[begin]; ++end) {
      if (written.lane[end] < 0) continue;
      const auto part = static_cast<std::size_t>(end);
      some = true;
      fresh = fresh && written.may[end];
      for (int64_t piece = pieces.low[part]; fresh && piece < pieces.high[part]; ++piece) fresh = unseen.has(piece);
    }
    if (some && fresh) flags[static_cast<std::size_t>(written.task[begin])] = 1;
    for (int64_t one = begin; one < end; ++one) {
      if (written.lane[one] < 0) continue;
      const auto part = static_cast<std::size_t>(one);
      for (int64_t piece = unseen.next(pieces.low[part]); piece < pieces.high[part]; piece = unseen.next(piece)) {
        state[static_cast<std::size_t>(piece)] = fresh ? State::OPENED : State::ADDED;
        unseen.remove(piece);
      }
    }
  }
  return state;
}

Openers find(const Written& written, Column<const int64_t> held, int64_t tasks) {
  const Pieces pieces = cut(written, held);
  Openers found{std::vector<int32_t>(static_cast<std::size_t>(tasks)), {}, {}, {}};
  const std::vector<State> state = visit(written, pieces, found.flags);
  for (std::size_t lane = 0; lane + 1 < pieces.ptr.size(); ++lane) {
    bool longer = false;  // what lies before is open, too
    const auto end = static_cast<std::size_t>(pieces.ptr[lane + 1]) - 1;
    for (auto at = static_cast<std::size_t>(pieces.ptr[lane]); at < end; ++at) {
      const bool opened = state[at] == State::OPENED;
      if (!opened && !longer) {
        found.lane.push_back(static_cast<int64_t>(lane));
        found.row.push_back(pieces.points[at]);
        found.rows.push_back(0);
      }
      if (!opened) found.rows.back() += pieces.points[at + 1] - pieces.points[at];
      longer = !opened;
    }
  }
  return found;
}

// Rows of ranks that some leave: where ranges of a rank begin and end, rising once all are there.
struct Leaving {
  std::vector<int64_t> low, high;

  void add(int64_t begin, int64_t end) {
    if (!low.empty() && begin <= high.back() && end >= low.back()) {
      low.back() = std::min(begin, low.back());
      high.back() = std::max(end, high.back());
    } else {
      low.push_back(begin);
      high.push_back(end);
    }
  }
  void sort() {
    std::sort(low.begin(), low.end());
    std::sort(high.begin(), high.end());
  }
  // Whether none of these rows leaves: no range that begins before their end ends behind their first.
  bool keeps(int64_t begin, int64_t end) const {
    return std::lower_bound(low.begin(), low.end(), end) - low.begin() ==
           std::upper_bound(high.begin(), high.end(), begin) - high.begin();
  }
};

}  // namespace

void bind_first_writes(nb::module_& m) {
  m.def("find", [](IntsIn<"task"> task, IntsIn<"lane"> lane, IntsIn<"row"> row, IntsIn<"rows"> rows,
                   In<bool, "may"> may, In<int64_t, "held"> held, int64_t tasks) {
    Openers found = unlocked([&] { return find({task, lane, row, rows, may}, held, tasks); });
    return nb::make_tuple(handed(std::move(found.flags)), handed(std::move(found.lane)), handed(std::move(found.row)),
                          handed(std::move(found.rows)));
  });

  // Whether none of the rows [row, row + rows) of a rank leaves it, false where rank is -1.
  m.def("stay_put", [](IntsIn<"rank"> rank, IntsIn<"row"> row, IntsIn<"rows"> rows, IntsIn<"home"> home,
                       IntsIn<"first"> first, IntsIn<"size"> size, In<bool, "leave"> leave, int64_t ranks) {
    New<bool> stay(rank.size());
    unlocked([&] {
      std::vector<Leaving> leaving(static_cast<std::size_t>(ranks));
      for (int64_t one = 0; one < home.size(); ++one)
        if (leave[one]) leaving[static_cast<std::size_t>(home[one])].add(first[one], first[one] + size[one]);
      for (Leaving& one : leaving) one.sort();
      for (int64_t part = 0; part < rank.size(); ++part)
        stay[part] = rank[part] >= 0 &&
                     leaving[static_cast<std::size_t>(rank[part])].keeps(row[part], row[part] + rows[part]);
    });
    return stay.array();
  });
}

}  // namespace apportion
