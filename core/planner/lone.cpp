// Assigns lone sequences to the ranks of groups: apportion/planner/inner/lone.py.

#include "bind.hpp"

namespace apportion {

namespace {

struct Sequences {
  Column<const int64_t> time, size;  // in descending order of time
};

// load: current load; room: free tokens.
struct Ranks {
  Column<const double> speed;
  Array<double> load;
  Array<int64_t> room;

  // The rank in [low, high) that has room and ends earliest; -1 if none has room.
  int64_t earliest_rank(int64_t low, int64_t high, int64_t time, int64_t size) const {
    int64_t best = -1;
    double min_end = 0;
    for (int64_t rank = low; rank < high; ++rank) {
      const double end = (load[rank] + static_cast<double>(time)) / speed[rank];
      if (room[rank] < size || (best >= 0 && !(end < min_end))) continue;
      best = rank;
      min_end = end;
    }
    return best;
  }
};

// A group of ranks [low, high). time, tokens: means over its ranks, relative to their speeds.
struct Group {
  int64_t low, high;
  double time = 0, tokens = 0;
};

// Assigns sequences in batches, as many as a group has ranks, to the group whose larger fraction of time or tokens is
// smallest. The sequences of a batch take similar time, so the group's ranks stay even; each goes to the rank that ends
// earliest, in the group or, if none of its ranks has room, among all.
std::pair<Array<int64_t>, Array<double>> deal(const Sequences& sequences, Column<const int64_t> first,
                                              Column<const double> speeds, Column<const double> load, Ints room) {
  Array<int64_t> home(sequences.time.size());
  Ranks ranks{speeds, Array<double>::of(load), Array<int64_t>::of(room)};
  std::vector<Group> groups;
  for (int64_t group = 0; group + 1 < first.size(); ++group) groups.push_back({first[group], first[group + 1]});
  int64_t all_time = 0, all_tokens = 0;
  for (const int64_t time : sequences.time) all_time += time;
  for (const int64_t size : sequences.size) all_tokens += size;
  const auto whole_time = static_cast<double>(std::max<int64_t>(all_time, 1));
  const auto whole_tokens = static_cast<double>(std::max<int64_t>(all_tokens, 1));
  const auto fill = [&](const Group& a) { return std::max(a.time / whole_time, a.tokens / whole_tokens); };
  for (int64_t at = 0; at < home.size();) {
    const Group target = *std::min_element(groups.begin(), groups.end(), [&](const Group& a, const Group& b) {
      return fill(a) < fill(b);
    });
    for (const int64_t end = std::min(at + target.high - target.low, home.size()); at < end; ++at) {
      const int64_t time = sequences.time[at], size = sequences.size[at];
      int64_t best = ranks.earliest_rank(target.low, target.high, time, size);
      if (best < 0) best = ranks.earliest_rank(0, groups.back().high, time, size);
      home[at] = best;
      if (best < 0) continue;
      ranks.load[best] += static_cast<double>(time);
      ranks.room[best] -= size;
      Group& home_group = *std::find_if(groups.begin(), groups.end(), [&](const Group& a) { return best < a.high; });
      const auto members = static_cast<double>(home_group.high - home_group.low);
      home_group.time += static_cast<double>(time) / ranks.speed[best] / members;
      home_group.tokens += static_cast<double>(size) / ranks.speed[best] / members;
    }
  }
  return {std::move(home), std::move(ranks.load)};
}

}  // namespace

static const Area area("lone", [](nb::module_& m) {
  def(m, "deal(sequences, first, speeds, load, room)", deal);
});

}  // namespace apportion
