// Local search by swaps between the heaviest bin and a lighter one: apportion/planner/solvers/partition/swap.py.

#include "bind.hpp"

namespace apportion {

namespace {

constexpr int64_t BINS = 8;    // bins considered together, the lightest first
constexpr int64_t STEPS = 16;  // the largest number of exchanges, per bin

struct Item {
  int64_t number, weight, size;
};

// Positions of items in the order in which `Swaps` gets them: by ascending size, the lightest first among equal sizes.
using Places = std::vector<int64_t>;

struct Bin {
  Places places;  // ascending
  int64_t load = 0, used = 0, cap = 0;
  double speed = 1;

  double time() const { return static_cast<double>(load) / speed; }
  void take(int64_t place, const Item& item) {
    places.insert(std::lower_bound(places.begin(), places.end(), place), place);
    load += item.weight;
    used += item.size;
  }
  void give(int64_t place, const Item& item) {
    places.erase(std::lower_bound(places.begin(), places.end(), place));
    load -= item.weight;
    used -= item.size;
  }
};

// Exchanges one item of the heavy bin for up to two of the light one; all are positions, -1 for none.
struct Exchange {
  int64_t sent = -1;
  std::array<int64_t, 2> received = {-1, -1};
};

class Swaps {
 public:
  // allowed: [items, bins], or [0, bins] if all items allow any.
  Swaps(Growing<Item> items, Growing<Bin> bins, Matrix<const bool> allowed)
      : items_(std::move(items)), bins_(std::move(bins)), allowed_(allowed) {}

  // Repeats until no bin's time is above the goal, or nothing helps.
  void improve(double goal) {
    for (int64_t step = 0; step < STEPS * bins_.count() && improve_once(goal);) ++step;
  }
  const Growing<Bin>& bins() const { return bins_; }

 private:
  const Item& at(int64_t place) const { return items_[place]; }
  bool may_hold(int64_t place, int64_t bin) const {
    return allowed_.rows() == 0 || allowed_[at(place).number][bin];
  }

  bool improve_once(double goal) {
    Growing<double> time;
    for (const Bin& bin : bins_) time.push_back(bin.time());
    const int64_t heavy = std::max_element(time.begin(), time.end()) - time.begin();
    if (time[heavy] <= goal) return false;
    const auto light = ordered(bins_.count(), [&](int64_t a, int64_t b) { return time[a] < time[b]; });
    Exchange best;
    Bin* other = nullptr;
    double lowest_time = time[heavy];
    for (int64_t number = 0; number < light.count(); ++number) {
      if (number % BINS == 0 && other) break;
      if (light[number] == heavy) continue;
      const double before = lowest_time;
      look(heavy, light[number], lowest_time, best);
      if (lowest_time < before) other = &bins_[light[number]];
    }
    if (!other) return false;
    move(best.sent, bins_[heavy], *other);
    for (const int64_t place : best.received)
      if (place >= 0) move(place, *other, bins_[heavy]);
    return true;
  }

  void move(int64_t place, Bin& source, Bin& target) {
    source.give(place, at(place));
    target.take(place, at(place));
  }

  // Lowers `lowest_time`, the time of the heavier bin after the best exchange, if a better exchange exists.
  void look(int64_t heavy, int64_t light, double& lowest_time, Exchange& best) const {
    const Bin &from = bins_[heavy], &to = bins_[light];
    Places candidates;
    for (const int64_t place : to.places)
      if (may_hold(place, heavy)) candidates.push_back(place);
    Places lightest(candidates.size() + 1, -1);  // the lightest item at or after each position
    for (std::size_t i = candidates.size(); i-- > 0;) {
      const int64_t next = lightest[i + 1];
      lightest[i] = next < 0 || at(candidates[i]).weight <= at(next).weight ? candidates[i] : next;
    }
    for (const int64_t a : from.places) {
      if (!may_hold(a, light)) continue;
      for (std::size_t i = 0; i <= candidates.size(); ++i) {
        const int64_t b = i == 0 ? -1 : candidates[i - 1];
        int64_t weight = at(a).weight, size = at(a).size, c = -1;
        if (b >= 0) {
          weight -= at(b).weight;
          size -= at(b).size;
        }
        const int64_t shortage = to.used + size - to.cap;
        if (weight > 0 && shortage > 0 && b >= 0) {  // a second item makes room
          const auto large = std::partition_point(candidates.begin(), candidates.end(),
                                                  [&](int64_t place) { return at(place).size < shortage; });
          c = lightest[static_cast<std::size_t>(large - candidates.begin())];
          if (c < 0 || c == b) continue;
          weight -= at(c).weight;
          size -= at(c).size;
        }
        if (weight <= 0 || to.used + size > to.cap || from.used - size > from.cap) continue;
        const double value = std::max(static_cast<double>(from.load - weight) / from.speed,
                                      static_cast<double>(to.load + weight) / to.speed);
        if (value < lowest_time) {
          lowest_time = value;
          best = {a, {b, c}};
        }
      }
    }
  }

  Growing<Item> items_;  // by place
  Growing<Bin> bins_;
  Matrix<const bool> allowed_;
};

// order: the items by ascending size.
void improve(Column<int64_t> assigned, Column<const int64_t> order, Column<const int64_t> weights,
             Column<const int64_t> sizes, Column<const int64_t> caps, Column<const double> speeds,
             Matrix<const bool> allowed, double goal) {
  Growing<Bin> bins(caps.size());
  for (int64_t bin = 0; bin < caps.size(); ++bin) {
    bins[bin].cap = caps[bin];
    bins[bin].speed = speeds[bin];
  }
  Growing<Item> items;
  for (const int64_t item : order) {
    items.push_back({item, weights[item], sizes[item]});
    if (assigned[item] >= 0) bins[assigned[item]].take(items.count() - 1, items.back());
  }
  Swaps swaps(items, std::move(bins), allowed);
  swaps.improve(goal);
  for (int64_t bin = 0; bin < caps.size(); ++bin)
    for (const int64_t place : swaps.bins()[bin].places) assigned[items[place].number] = bin;
}

}  // namespace

static const Area area("swap", [](nb::module_& m) {
  def(m, "improve(assigned, order, weights, sizes, caps, speeds, allowed, goal)", improve);
});

}  // namespace apportion
