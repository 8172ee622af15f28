// Assigns lone sequences to ranks of a group: apportion/planner/inner/lone.py.
#include <algorithm>

#include "bind.hpp"

namespace apportion {

using std::int64_t;

namespace {

struct Sequences {
  Column<const int64_t> time, size;  // falling times
};

// load: current load; room: remaining tokens.
struct Ranks {
  Column<const double> speed;
  Column<double> load;
  std::vector<int64_t> room;

  // The rank in [low, high) with room and the earliest end, -1: none has room.
  int64_t soonest(int64_t low, int64_t high, int64_t time, int64_t size) const {
    int64_t best = -1;
    double least = 0;
    for (int64_t rank = low; rank < high; ++rank) {
      const double after = (load[rank] + static_cast<double>(time)) / speed[rank];
      if (room[static_cast<std::size_t>(rank)] < size || (best >= 0 && !(after < least))) continue;
      best = rank;
      least = after;
    }
    return best;
  }
};

// A group of ranks, [low, high): the shares of all time and of all tokens that its mean rank has.
struct Group {
  int64_t low, high;
  double time = 0, tokens = 0;
};

// Assigns batches of as many sequences as a group has ranks to the group with the least time or tokens, whichever
// fraction is larger: they take similar time, so its ranks stay even; each goes to the rank with the earliest end,
// among the group's or, without room, among all.
void deal(const Sequences& sequences, std::vector<Group> groups, Ranks ranks, Column<int64_t> home) {
  int64_t all_time = 0, all_tokens = 0;
  for (const int64_t time : sequences.time) all_time += time;
  for (const int64_t size : sequences.size) all_tokens += size;
  const auto whole_time = static_cast<double>(std::max<int64_t>(all_time, 1));
  const auto whole_tokens = static_cast<double>(std::max<int64_t>(all_tokens, 1));
  const auto filled = [&](const Group& one) { return std::max(one.time / whole_time, one.tokens / whole_tokens); };
  for (int64_t at = 0; at < home.size();) {
    const Group own = *std::min_element(groups.begin(), groups.end(), [&](const Group& one, const Group& two) {
      return filled(one) < filled(two);
    });
    for (const int64_t end = std::min(at + own.high - own.low, home.size()); at < end; ++at) {
      const int64_t time = sequences.time[at], size = sequences.size[at];
      int64_t best = ranks.soonest(own.low, own.high, time, size);
      if (best < 0) best = ranks.soonest(0, groups.back().high, time, size);
      home[at] = best;
      if (best < 0) continue;
      ranks.load[best] += static_cast<double>(time);
      ranks.room[static_cast<std::size_t>(best)] -= size;
      Group& of = *std::find_if(groups.begin(), groups.end(), [&](const Group& one) { return best < one.high; });
      const auto members = static_cast<double>(of.high - of.low);
      of.time += static_cast<double>(time) / ranks.speed[best] / members;
      of.tokens += static_cast<double>(size) / ranks.speed[best] / members;
    }
  }
}

}  // namespace

void bind_lone(nb::module_& m) {
  m.def("deal", [](In<int64_t, "times"> times, In<int64_t, "sizes"> sizes, In<int64_t, "first"> first,
                   In<double, "speeds"> speeds, In<double, "load"> load, IntsIn<"room"> room) {
    New<int64_t> home(times.size());
    New<double> loads(load.size());
    unlocked([&] {
      std::copy(load.begin(), load.end(), loads.begin());
      Ranks ranks{speeds, loads, {}};
      for (int64_t rank = 0; rank < room.size(); ++rank) ranks.room.push_back(room[rank]);
      std::vector<Group> groups;
      for (int64_t group = 0; group + 1 < first.size(); ++group) groups.push_back({first[group], first[group + 1]});
      deal({times, sizes}, std::move(groups), std::move(ranks), home);
    });
    return nb::make_tuple(home.array(), loads.array());
  });
}

}  // namespace apportion
