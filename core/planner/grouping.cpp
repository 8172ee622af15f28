// Assigns sequences to rank groups of mixed sizes: apportion/planner/solvers/grouping/mixing.py.

#include "bind.hpp"

namespace apportion {

namespace {

constexpr double NEVER = std::numeric_limits<double>::infinity();
constexpr int MAX_EXCHANGES = 500;  // descents end much earlier, except in degenerate ties
constexpr int64_t MAX_PAIRS = 20'000'000;  // maximum moves and swaps to evaluate, for groups of thousands of sequences
constexpr double MIN_GAIN = 1e-12;

// times: [sequences, degrees], the time in a group of that degree, NEVER if forbidden; sizes: tokens of sequences.
struct Sequences {
  Matrix<const double> times;
  Column<const int64_t> sizes;

  int64_t count() const { return sizes.size(); }
};

// Each group's column of `times`, and its token limit.
struct Groups {
  Column<const int64_t> column, rooms;

  int64_t count() const { return column.size(); }
};

// First-fit decreasing within a time limit: each sequence in `order` goes to the group where it takes the least
// rank-time (ties: the tightest fit), or opens a group of the degree that it needs. Returns the columns of the
// groups, none if not all sequences fit, and the group of each sequence.
std::pair<Growing<int64_t>, Array<int64_t>> first_fit(const Sequences& samples, Column<const int64_t> order,
                                                      Column<const int64_t> need, Column<const int64_t> degrees,
                                                      Column<const int64_t> rooms, int64_t ranks, double limit) {
  struct Group {
    int64_t column;
    double load = 0;
    int64_t used = 0;
  };
  std::vector<Group> groups;
  Array<int64_t> group(samples.count());
  for (const int64_t k : order) {
    const Column<const double> times = samples.times[k];
    std::size_t best = groups.size();
    double min_spent = NEVER, tightest = NEVER;
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const int64_t c = groups[g].column;
      const double room = limit - groups[g].load - times[c], spent = times[c] * static_cast<double>(degrees[c]);
      if (room < 0 || groups[g].used + samples.sizes[k] > rooms[c]) continue;
      if (spent < min_spent || (spent == min_spent && room < tightest)) {
        best = g;
        min_spent = spent;
        tightest = room;
      }
    }
    if (best == groups.size()) {
      if (degrees[need[k]] > ranks) return {Growing<int64_t>(), std::move(group)};
      groups.push_back({need[k]});
      ranks -= degrees[need[k]];
    }
    group[k] = static_cast<int64_t>(best);
    groups[best].load += times[groups[best].column];
    groups[best].used += samples.sizes[k];
  }
  Growing<int64_t> column;
  for (const Group& item : groups) column.push_back(item.column);
  return {std::move(column), std::move(group)};
}

// Assigns each sequence, longest first, to the group where it ends earliest; nullopt if there is no room for one.
std::optional<Array<int64_t>> list_schedule(const Sequences& samples, const Groups& groups) {
  Array<double> shortest(samples.count()), load(groups.count());
  Array<int64_t> group(samples.count()), left = Array<int64_t>::of(groups.rooms);
  for (int64_t k = 0; k < samples.count(); ++k) shortest[k] = *std::min_element(samples.times[k].begin(), samples.times[k].end());
  for (const int64_t k : ordered(samples.count(), [&](int64_t a, int64_t b) { return shortest[a] > shortest[b]; })) {
    int64_t best = -1;
    double min_end = NEVER;
    for (int64_t g = 0; g < groups.count(); ++g) {
      const double end = load[g] + samples.times[k][groups.column[g]];
      if (samples.sizes[k] > left[g] || !(end < min_end)) continue;
      best = g;
      min_end = end;
    }
    if (best < 0) return {};
    group[k] = best;
    load[best] = min_end;
    left[best] -= samples.sizes[k];
  }
  return group;
}

// item: a sequence of the slowest group; to: its new group; other: a sequence moved back, or -1. All -1: nothing helps.
struct Exchange {
  int64_t item = -1, to = -1, other = -1;
};

// The move or swap that minimizes the time of the slower of its two groups; in a tie, the first.
Exchange best_exchange(const Sequences& samples, const Groups& groups, Column<const int64_t> group,
                       Column<const double> time, Column<const int64_t> left, int64_t slow) {
  Exchange best;
  double min_time = time[slow] * (1 - MIN_GAIN);
  const int64_t slow_column = groups.column[slow];
  for (int64_t i = 0; i < samples.count(); ++i) {
    if (group[i] != slow) continue;
    const Column<const double> times = samples.times[i];
    const double rest = time[slow] - times[slow_column];
    for (int64_t g = 0; g < groups.count(); ++g) {
      const double end = std::max(rest, time[g] + times[groups.column[g]]);
      if (g == slow || samples.sizes[i] > left[g] || !(end < min_time)) continue;
      min_time = end;
      best = {i, g, -1};
    }
    for (int64_t j = 0; j < samples.count(); ++j) {
      const int64_t g = group[j], grows = samples.sizes[i] - samples.sizes[j];
      const double swapped = rest + samples.times[j][slow_column];
      if (g == slow || !(swapped < min_time) || grows > left[g] || -grows > left[slow]) continue;
      const int64_t column = groups.column[g];
      const double end = std::max(swapped, time[g] - samples.times[j][column] + times[column]);
      if (!(end < min_time)) continue;
      min_time = end;
      best = {i, g, j};
    }
  }
  return best;
}

// Makes the best move or swap out of the slowest group while that shortens the longer of the two groups' times.
void descend(const Sequences& samples, const Groups& groups, Column<int64_t> group, Column<double> time) {
  Array<int64_t> left(groups.count());
  int64_t pairs = 0;
  for (int exchange = 0; exchange < MAX_EXCHANGES; ++exchange) {
    const int64_t slow = std::max_element(time.begin(), time.end()) - time.begin();
    pairs += std::count(group.begin(), group.end(), slow) * (samples.count() + groups.count());
    if (pairs > MAX_PAIRS) return;
    std::copy(groups.rooms.begin(), groups.rooms.end(), left.begin());
    for (int64_t k = 0; k < samples.count(); ++k) left[group[k]] -= samples.sizes[k];
    const Exchange best = best_exchange(samples, groups, group, time, left, slow);
    if (best.item < 0) return;
    group[best.item] = best.to;
    if (best.other >= 0) group[best.other] = slow;
    std::fill(time.begin(), time.end(), 0);
    for (int64_t k = 0; k < samples.count(); ++k) time[group[k]] += samples.times[k][groups.column[group[k]]];
  }
}

// Annealing steps, drawn in advance: each moves a sequence to group `to`, or swaps it with sequence `to` - groups, if
// that is worse by less than `bar`.
struct Steps {
  Column<const int64_t> moved, to;
  Column<const double> bar;
};

// Anneals; `group` becomes the best assignment found. load, left: the time and the free tokens of each group. above:
// the time above the goal, summed over groups. Here, `times` has a column per group.
void anneal(const Sequences& samples, const Steps& steps, double goal, double above, Column<double> load,
            Column<int64_t> left, Column<int64_t> group) {
  Array<int64_t> current = Array<int64_t>::of(group);
  const auto excess = [goal](double time) { return std::max(0.0, time - goal); };
  double lowest = above;
  for (int64_t step = 0; step < steps.moved.size(); ++step) {
    const int64_t k = steps.moved[step], other = steps.to[step] - load.size();
    const int64_t g = current[k], h = other < 0 ? steps.to[step] : current[other];
    const int64_t grows = other < 0 ? samples.sizes[k] : samples.sizes[k] - samples.sizes[other];
    if (h == g || left[h] < grows || left[g] < -grows) continue;
    double here = load[g] - samples.times[k][g], there = load[h] + samples.times[k][h];
    if (other >= 0) {
      here += samples.times[other][g];
      there -= samples.times[other][h];
    }
    double increase = excess(here) - excess(load[g]);
    increase += excess(there) - excess(load[h]);
    if (!(increase < steps.bar[step])) continue;
    load[g] = here;
    load[h] = there;
    left[g] += grows;
    left[h] -= grows;
    current[k] = h;
    if (other >= 0) current[other] = g;
    above += increase;
    if (!(above < lowest - MIN_GAIN * goal)) continue;
    lowest = above;
    std::copy(current.begin(), current.end(), group.begin());
    if (lowest <= MIN_GAIN * goal) return;
  }
}

}  // namespace

static const Area area("grouping", [](nb::module_& m) {
  def(m, "first_fit(sequences, order, need, degrees, rooms, ranks, limit)", first_fit);
  def(m, "list_schedule(sequences, groups)", list_schedule);
  def(m, "descend(sequences, groups, group, time)", descend);
  def(m, "anneal(sequences, steps, goal, above, load, left, group)", anneal);
});

}  // namespace apportion
