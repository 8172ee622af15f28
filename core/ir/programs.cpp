// Matching of sends with receives.
#include "ir/programs.hpp"

#include "bind.hpp"

namespace apportion {

namespace {

constexpr int64_t NONE = -1;

// Rounds visit the ranks' rows at scattered places, one cache line each, so all data of a row is in one struct. Index:
// the smaller of two types if it suffices, since half the bytes take half the time.
template <class Index>
struct End {
  Index peer;   // twice the peer, plus 1 for a send
  Index owner;  // the rank
  Index tile;   // what is moved
  Index after;  // the next transfer of a queue
};

// Transfers by rank, first in, first out.
template <class Index>
class Queues {
 public:
  Queues(Column<End<Index>> ends, int64_t ranks) : ends_(ends), first_(ranks, NONE), last_(ranks) {}

  void append(int64_t item) {
    const auto queue = ends_[item].peer >> 1;
    if (first_[queue] < 0)
      first_[queue] = item;
    else
      ends_[last_[queue]].after = static_cast<Index>(item);
    last_[queue] = item;
    ends_[item].after = NONE;
  }
  int64_t first(int64_t rank) const { return first_[rank]; }
  void drop_first(int64_t rank) { first_[rank] = ends_[first_[rank]].after; }
  void clear(int64_t rank) { first_[rank] = NONE; }

 private:
  Column<End<Index>> ends_;
  Array<int64_t> first_, last_;
};

// Pairs sends with receives, round by round. Linear in the transfers.
template <class Index>
void match_as(const Programs& programs, Column<const int64_t> tile, Column<int64_t> mate, Column<bool> agreed) {
  const int64_t ranks = programs.ranks();
  const Column<const int64_t> ptr = programs.lists[TRANSFERS].ptr;
  const Array<End<Index>> ends(mate.size());
  for (int64_t rank = 0; rank < ranks; ++rank)
    for (int64_t t = ptr[rank]; t < ptr[rank + 1]; ++t) {
      const int64_t moved = tile.size() == 0 ? 0 : tile[programs.operands.ptr[rank] + programs.operand[t]];
      ends[t] = {static_cast<Index>(2 * programs.peer[t] + programs.send[t]), static_cast<Index>(rank),
                 static_cast<Index>(moved), NONE};
    }
  // sends by destination, filled for the whole round in the order of source ranks; receives by source, filled for one
  // destination at a time
  Queues<Index> sends(ends, ranks), receives(ends, ranks);
  std::vector<Step> launches;  // of all ranks, by round and then by rank
  programs.each_step([&](const Step& step) {
    if (step.op == Op::LAUNCH) launches.push_back(step);
  });
  std::ranges::stable_sort(launches, {}, [&](const Step& step) { return programs.round[step.index]; });
  for (auto begin = launches.begin(), end = begin; begin != launches.end(); begin = end) {
    const int64_t round = programs.round[begin->index];
    end = std::find_if(begin, launches.end(), [&](const Step& step) { return programs.round[step.index] != round; });
    for (auto launch = begin; launch != end; ++launch)
      for (int64_t t = launch->first; t < launch->end; ++t)
        if (ends[t].peer & 1) sends.append(t);
    for (auto launch = begin; launch != end; ++launch) {
      for (int64_t t = launch->first; t < launch->end; ++t)
        if (!(ends[t].peer & 1)) receives.append(t);
      for (int64_t t = sends.first(launch->rank); t >= 0; t = ends[t].after) {
        const int64_t source = ends[t].owner, other = receives.first(source);
        if (other < 0) continue;
        mate[t] = other;
        mate[other] = t;
        agreed[t] = agreed[other] = ends[t].tile == ends[other].tile;
        receives.drop_first(source);
      }
      sends.clear(launch->rank);
      for (int64_t t = launch->first; t < launch->end; ++t) receives.clear(ends[t].peer >> 1);
    }
    for (auto launch = begin; launch != end; ++launch)
      for (int64_t t = launch->first; t < launch->end; ++t) sends.clear(ends[t].peer >> 1);
  }
}

}  // namespace

std::pair<Array<int64_t>, Array<bool>> match(const Programs& programs, Column<const int64_t> tile) {
  Array<int64_t> mate(programs.send.size(), NONE);
  Array<bool> agreed(mate.size());
  const auto largest = std::max(mate.size(), tile.size() == 0 ? 0 : *std::max_element(tile.begin(), tile.end()));
  largest < int64_t{1} << 31 ? match_as<int32_t>(programs, tile, mate, agreed)
                          : match_as<int64_t>(programs, tile, mate, agreed);
  return {std::move(mate), std::move(agreed)};
}

static const Area area("programs", [](nb::module_& m) { def(m, "match(arrays, tile)", match); });

}  // namespace apportion
