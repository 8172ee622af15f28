// Initialization of accumulators: tasks that are first on all their rows overwrite them; other rows are cleared before.
//
//   task 0          ┌─────────┐                 first on all of its rows: opens (initializes) them
//   task 1     ┌────┼────┐    │                 first on some of its rows: these are cleared, the task adds
//   task 2     │    │    │    │  ┌────┐         opens its rows
//   rows       ▒▒▒▒▒■■■■■■■■■■■▒▒▒■■■■■■▒▒▒     ▒ cleared
//
//   points    of each lane: 0, the begins and ends of its parts' rows, and its end
//   pieces    the rows from one point to the next, which belong to the same parts
//   state     of each piece: whether the first task that reaches it, in task order, opens it
#include "planner/lower/sides.hpp"

namespace apportion::lower {

namespace {

// ptr: the first point of each lane, and the end; low, high: each part's first piece, and the end of its pieces.
struct Pieces {
  Growing<int64_t> points, ptr;
  Growing<int32_t> low, high;
};

enum class State : uint8_t { UNSEEN, ADDED, OPENED };

// The points of lanes, one lane after another. Many parts share points, so a hash table holds those of the current
// lane; a slot is valid if it belongs to this lane.
class Points {
 public:
  explicit Points(int64_t most) {  // most: maximum number of points of a lane
    while (slots_.count() < 2 * most) slots_.resize(2 * slots_.size());
  }
  void add(int64_t point) {
    Slot& slot = at(point);
    if (slot.lane == lane_) return;
    slot = {point, lane_, 0};
    points_.push_back(point);
  }
  // Sorts the points of the lane.
  void sort() {
    std::sort(points_.begin() + first_, points_.end());
    for (int64_t place = first_; place < points_.count(); ++place) at(points_[place]).place = static_cast<int32_t>(place);
  }
  // The number of a point of the lane among all points.
  int32_t find(int64_t point) { return at(point).place; }
  void close() {
    ++lane_;
    first_ = points_.count();
  }
  int64_t count() const { return points_.count(); }
  Growing<int64_t> take() { return std::move(points_); }

 private:
  struct Slot {
    int64_t point;
    int32_t lane = -1, place = 0;
  };
  Slot& at(int64_t point) {
    const int64_t mask = slots_.count() - 1;
    auto slot = static_cast<int64_t>(static_cast<uint64_t>(point) * 0x9E3779B97F4A7C15u >> 32) & mask;
    while (slots_[slot].lane == lane_ && slots_[slot].point != point) slot = (slot + 1) & mask;
    return slots_[slot];
  }

  Growing<int64_t> points_;
  Growing<Slot> slots_ = Growing<Slot>(16);
  int64_t first_ = 0;
  int32_t lane_ = 0;
};

// Parts by lane: their order, the offset of each lane, and the largest number per lane.
struct ByLane {
  Growing<int32_t> order;
  Growing<int64_t> begin;
  int64_t longest = 0;

  ByLane(const Growing<WrittenRows>& written, int64_t lanes) : begin(lanes + 2) {
    for (const WrittenRows& part : written) longest = std::max(longest, ++begin[part.lane + 2]);
    std::partial_sum(begin.begin(), begin.end(), begin.begin());
    order = Growing<int32_t>(begin.back());
    for (int32_t part = 0; part < written.count(); ++part) order[begin[written[part].lane + 1]++] = part;
  }
  Column<const int32_t> of(int64_t lane) const { return {order.data() + begin[lane], begin[lane + 1] - begin[lane]}; }
};

Pieces cut(const Growing<WrittenRows>& written, const Growing<int64_t>& held) {
  const ByLane by_lane(written, held.count());
  Points points(2 * by_lane.longest + 2);
  Growing<int64_t> ptr(1);
  Growing<int32_t> low(written.count()), high(written.count());
  for (int64_t lane = 0; lane < held.count(); ++lane) {
    points.add(0);
    points.add(held[lane]);
    for (const int32_t part : by_lane.of(lane)) {
      if (written[part].rows == held[lane]) continue;
      points.add(written[part].row);
      points.add(written[part].row + written[part].rows);
    }
    points.sort();
    for (const int32_t part : by_lane.of(lane)) {
      low[part] = points.find(written[part].row);
      high[part] = points.find(written[part].row + written[part].rows);
    }
    points.close();
    ptr.push_back(points.count());
  }
  return {points.take(), std::move(ptr), std::move(low), std::move(high)};
}

// Finds the first piece at or after a given one that no task has reached yet: `after_` holds it or a step towards it.
class UnseenPieces {
 public:
  explicit UnseenPieces(int64_t pieces) : after_(pieces + 1) { std::iota(after_.begin(), after_.end(), 0); }
  bool has(int64_t piece) const { return after_[piece] == piece; }
  void remove(int64_t piece) { after_[piece] = piece + 1; }
  int64_t next(int64_t piece) {
    int64_t root = piece;
    while (!has(root)) root = after_[root];
    while (after_[piece] != root) piece = std::exchange(after_[piece], root);
    return root;
  }

 private:
  Growing<int64_t> after_;
};

// Sets the flags of tasks that open all pieces they reach; returns the state of each piece.
Growing<State> visit(const Growing<WrittenRows>& written, const Pieces& pieces, Growing<int32_t>& flags) {
  Growing<State> state(pieces.points.count(), State::UNSEEN);
  UnseenPieces unseen(state.count());
  for (int64_t begin = 0, end; begin < written.count(); begin = end) {
    bool fresh = true;
    for (end = begin; end < written.count() && written[end].task == written[begin].task; ++end) {
      fresh = fresh && written[end].may_open;
      for (int64_t piece = pieces.low[end]; fresh && piece < pieces.high[end]; ++piece) fresh = unseen.has(piece);
    }
    if (fresh) flags[written[begin].task] = 1;
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t piece = unseen.next(pieces.low[i]); piece < pieces.high[i]; piece = unseen.next(piece)) {
        state[piece] = fresh ? State::OPENED : State::ADDED;
        unseen.remove(piece);
      }
    }
  }
  return state;
}

}  // namespace

Openers find_openers(const Growing<WrittenRows>& written, const Growing<int64_t>& held, int64_t tasks) {
  const Pieces pieces = cut(written, held);
  Openers openers{Growing<int32_t>(tasks), {}};
  const Growing<State> state = visit(written, pieces, openers.flags);
  for (int64_t lane = 0; lane < held.count(); ++lane) {
    bool extends = false;  // whether the preceding rows are cleared, too
    for (int64_t at = pieces.ptr[lane]; at < pieces.ptr[lane + 1] - 1; ++at) {
      const bool opened = state[at] == State::OPENED;
      if (!opened && !extends) openers.cleared.push_back({lane, pieces.points[at], 0});
      if (!opened) openers.cleared.back().rows += pieces.points[at + 1] - pieces.points[at];
      extends = !opened;
    }
  }
  return openers;
}

}  // namespace apportion::lower
