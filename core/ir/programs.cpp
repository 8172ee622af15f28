// Matching of sends with receives.
#include <vector>

#include "bind.hpp"

namespace apportion {

using std::int64_t;

namespace {

constexpr int64_t NONE = -1;

// The rounds visit the ranks' rows in leaps, each of which costs a line of the cache: all that they need of a row is
// in one. Index: of two types the smaller one that holds it, as half the bytes are half the time.
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
  Queues(Column<End<Index>> ends, int64_t ranks)
      : ends_(ends), first_(static_cast<std::size_t>(ranks), NONE), last_(first_) {}

  void append(int64_t item) {
    const auto queue = at(ends_[item].peer >> 1);
    if (first_[queue] < 0)
      first_[queue] = item;
    else
      ends_[last_[queue]].after = static_cast<Index>(item);
    last_[queue] = item;
    ends_[item].after = NONE;
  }
  int64_t first(int64_t rank) const { return first_[at(rank)]; }
  void drop_first(int64_t rank) { first_[at(rank)] = ends_[first_[at(rank)]].after; }
  void clear(int64_t rank) { first_[at(rank)] = NONE; }

 private:
  std::size_t at(int64_t rank) const {
    check_index(rank, static_cast<int64_t>(first_.size()));
    return static_cast<std::size_t>(rank);
  }
  Column<End<Index>> ends_;
  std::vector<int64_t> first_, last_;
};

// Launches by round, and their transfers: `ProgramView` of apportion/ir/plan/programs.py.
struct Rounds {
  Column<const int64_t> order, ptr, starts;
  Ints counts;
  Column<const int64_t> rank_of;
  Ints send, peer, operand;
  Column<const int64_t> transfer_ptr, bases, tile;
};

// Pairs the k-th send i -> j of each round with the k-th receive of j from i. Linear in the transfers.
template <class Index>
void match(const Rounds& given, Column<int64_t> mate, Column<bool> agreed) {
  const int64_t ranks = given.transfer_ptr.size() - 1;
  std::vector<End<Index>> storage(static_cast<std::size_t>(mate.size()));
  const Column<End<Index>> ends(storage.data(), mate.size());
  for (int64_t rank = 0; rank < ranks; ++rank)
    for (int64_t t = given.transfer_ptr[rank]; t < given.transfer_ptr[rank + 1]; ++t)
      ends[t] = {static_cast<Index>(2 * given.peer[t] + given.send[t]), static_cast<Index>(rank),
                 static_cast<Index>(given.tile[given.bases[rank] + given.operand[t]]), NONE};
  // sends by destination, filled for the whole round in the order of source ranks; receives by source, filled for one
  // destination at a time
  Queues<Index> sends(ends, ranks), receives(ends, ranks);
  const auto each = [&given](int64_t i, auto&& visit) {
    const int64_t launch = given.order[i], begin = given.starts[launch];
    for (int64_t t = begin; t < begin + given.counts[launch]; ++t) visit(t);
  };
  for (int64_t turn = 0; turn + 1 < given.ptr.size(); ++turn) {
    const int64_t begin = given.ptr[turn], end = given.ptr[turn + 1];
    for (int64_t i = begin; i < end; ++i)
      each(i, [&](int64_t t) {
        if (ends[t].peer & 1) sends.append(t);
      });
    for (int64_t i = begin; i < end; ++i) {
      const int64_t rank = given.rank_of[given.order[i]];
      each(i, [&](int64_t t) {
        if (!(ends[t].peer & 1)) receives.append(t);
      });
      for (int64_t t = sends.first(rank); t >= 0; t = ends[t].after) {
        const int64_t source = ends[t].owner, other = receives.first(source);
        if (other < 0) continue;
        mate[t] = other;
        mate[other] = t;
        agreed[t] = agreed[other] = ends[t].tile == ends[other].tile;
        receives.drop_first(source);
      }
      sends.clear(rank);
      each(i, [&](int64_t t) { receives.clear(ends[t].peer >> 1); });
    }
    for (int64_t i = begin; i < end; ++i) each(i, [&](int64_t t) { sends.clear(ends[t].peer >> 1); });
  }
}

bool is_narrow(const Rounds& given) {
  int64_t most = given.send.size();
  for (const int64_t tile : given.tile) most = std::max(most, tile);
  return most < int64_t{1} << 31;
}

}  // namespace

void bind_programs(nb::module_& m) {
  m.def("match", [](In<int64_t, "order"> order, In<int64_t, "ptr"> ptr, In<int64_t, "starts"> starts,
                    IntsIn<"counts"> counts, In<int64_t, "rank_of"> rank_of, IntsIn<"send"> send, IntsIn<"peer"> peer,
                    IntsIn<"operand"> operand, In<int64_t, "transfer_ptr"> transfer_ptr, In<int64_t, "bases"> bases,
                    In<int64_t, "tile"> tile) {
    New<int64_t> mate(send.size());
    New<bool> agreed(send.size());
    unlocked([&] {
      std::fill(mate.begin(), mate.end(), NONE);
      std::fill(agreed.begin(), agreed.end(), false);
      const Rounds given{order, ptr, starts, counts, rank_of, send, peer, operand, transfer_ptr, bases, tile};
      is_narrow(given) ? match<std::int32_t>(given, mate, agreed) : match<int64_t>(given, mate, agreed);
    });
    return nb::make_tuple(mate.array(), agreed.array());
  });
}

}  // namespace apportion
