// Longest processing time first: apportion/planner/solvers/partition/lpt.py.

#include "bind.hpp"

namespace apportion {

namespace {

// Loads of bins, and a tournament tree over them: node n has children 2 n and 2 n + 1, and the leaves are bins.
class Bins {
 public:
  Bins(Column<const double> speed, Column<const int64_t> caps)
      : speed_(speed), load_(caps.size()), room_(Array<int64_t>::of(caps)) {
    while (leaves_ < caps.size()) leaves_ *= 2;
    nodes_ = Array<Node>(2 * leaves_);
    for (int64_t bin = 0; bin < caps.size(); ++bin) nodes_[leaves_ + bin] = {0, caps[bin]};
    for (int64_t node = leaves_ - 1; node > 0; --node) play(node);
  }

  Array<int64_t> take_load() { return std::move(load_); }
  double time_with(int64_t bin, int64_t weight) const { return static_cast<double>(load_[bin] + weight) / speed_[bin]; }

  void add(int64_t bin, int64_t weight, int64_t size) {
    load_[bin] += weight;
    room_[bin] -= size;
    int64_t node = leaves_ + bin;
    nodes_[node] = {time_with(bin, 0), room_[bin]};
    while (node > 1) play(node /= 2);
  }

  // The bin with the least load over speed among those with room, the first in a tie; -1 if there is none.
  int64_t lightest(int64_t size) const {
    int64_t node = 1;
    while (node < leaves_) node = 2 * node + (nodes_[2 * node + 1].time < nodes_[2 * node].time ? 1 : 0);
    if (nodes_[node].room >= size) return node - leaves_;
    int64_t best = -1;
    double best_time = std::numeric_limits<double>::infinity();
    node = 1;
    while (true) {
      const bool fits = nodes_[node].room >= size && (best < 0 || nodes_[node].time < best_time);
      if (fits && node < leaves_) {
        node *= 2;
        continue;
      }
      if (fits) {
        best = node - leaves_;
        best_time = nodes_[node].time;
      }
      while (node % 2 != 0) {  // go up while the node is a right child, then to the right sibling
        if (node == 1) return best;
        node /= 2;
      }
      ++node;
    }
  }

  // Like `lightest`, but only among some bins.
  int64_t lightest_of(Column<const int64_t> bins, int64_t size) const {
    int64_t best = -1;
    for (const int64_t bin : bins)
      if (room_[bin] >= size && (best < 0 || is_before(bin, best))) best = bin;
    return best;
  }

  bool is_before(int64_t a, int64_t b) const {
    const double left = time_with(a, 0), right = time_with(b, 0);
    return left < right || (left == right && a < b);
  }

 private:
  struct Node {
    double time = std::numeric_limits<double>::infinity();  // load over speed
    int64_t room = -1;                                       // the largest room of any bin below
  };
  void play(int64_t node) {
    const Node &left = nodes_[2 * node], &right = nodes_[2 * node + 1];
    nodes_[node] = {std::min(left.time, right.time), std::max(left.room, right.room)};
  }

  Column<const double> speed_;
  Array<int64_t> load_, room_;
  int64_t leaves_ = 1;
  Array<Node> nodes_;
};

// Items in an order. group: for each item, the number of its group of items with the same restriction, 0 for no
// restriction; bins: the bins that each group allows, as CSR.
struct Items {
  Column<const int64_t> order, weights, sizes, group, group_ptr, bins;
};

// Families and zones (`_Affinity`): the family of each item, or -1; the zone of each bin, and the bins of each zone as
// CSR. All are empty if unused.
struct Zones {
  Column<const int64_t> family, zone, zone_ptr, bins;
};

bool is_among(const std::vector<int64_t>& values, int64_t value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

// The lightest bin of some zones that has room and is below the limit; if there is none, `lightest`, the lightest of
// all bins.
int64_t nearest(const Bins& bins, const Zones& near, const std::vector<int64_t>& zones, int64_t lightest, double limit,
                int64_t size) {
  if (is_among(zones, near.zone[lightest])) return lightest;
  int64_t best = -1;
  for (const int64_t zone : zones) {
    const int64_t bin = bins.lightest_of(near.bins.slice(near.zone_ptr[zone], near.zone_ptr[zone + 1]), size);
    if (bin < 0 || !(bins.time_with(bin, 0) < limit)) continue;
    if (best < 0 || bins.is_before(bin, best)) best = bin;
  }
  return best >= 0 ? best : lightest;
}

// The bin of each item, and the load of each bin.
std::pair<Array<int64_t>, Array<int64_t>> assign(const Items& items, const Zones& near, Column<const double> speeds,
                                                 Column<const int64_t> caps) {
  Bins bins(speeds, caps);
  Array<int64_t> assigned(items.order.size());
  const int64_t families = near.family.size() ? *std::max_element(near.family.begin(), near.family.end()) + 1 : 0;
  std::vector<std::vector<int64_t>> zones(static_cast<std::size_t>(families));
  for (const int64_t item : items.order) {
    const int64_t weight = items.weights[item], size = items.sizes[item], group = items.group[item];
    std::vector<int64_t>* near_zones = nullptr;
    if (families > 0 && near.family[item] >= 0) near_zones = &zones[static_cast<std::size_t>(near.family[item])];
    int64_t best;
    if (group != 0)
      best = bins.lightest_of(items.bins.slice(items.group_ptr[group], items.group_ptr[group + 1]), size);
    else
      best = bins.lightest(size);
    if (group == 0 && near_zones && best >= 0) best = nearest(bins, near, *near_zones, best, bins.time_with(best, weight), size);
    assigned[item] = best;
    if (best < 0) continue;
    bins.add(best, weight, size);
    if (near_zones && !is_among(*near_zones, near.zone[best])) near_zones->push_back(near.zone[best]);
  }
  return {std::move(assigned), bins.take_load()};
}

}  // namespace

static const Area area("lpt", [](nb::module_& m) {
  def(m, "assign(items, near, speeds, caps)", assign);
});

}  // namespace apportion
