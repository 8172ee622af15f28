// Groups the transfers of a launch into messages.
#include "ir/messages.hpp"

#include "bind.hpp"

namespace apportion {

// Forms one message per peer and direction of each launch.
MessageGroups group(const Programs& programs, const RowSizes& sizes) {
  const Array2<int64_t> arena_heads(programs.ranks(), TENSORS);
  const Table& arenas = programs.arenas;
  for (int64_t rank = 0; rank < programs.ranks(); ++rank)
    for (int64_t at = arenas.ptr[rank]; at < arenas.ptr[rank + 1]; ++at)
      arena_heads[rank][arenas.columns[0][at]] = arenas.columns[2][at];
  const auto heads = [&](int64_t at, int64_t set) { return sizes.heads.of(programs.tensor_of(at), set); };
  // true if an operand has all columns of one array, whose numbers travel unchanged
  const auto is_whole = [&](int64_t rank, int64_t at) {
    const int64_t number = programs.tensor[at], set = programs.heads[at];
    if (!sizes.one_array[2 * number + programs.space[at]]) return false;
    if (programs.is_home(at)) return sizes.ordered[set] && heads(at, set) == heads(at, 0);
    return HEADLESS.has(programs.tensor_of(at)) || heads(at, set) == arena_heads[rank][number];
  };
  // true if one operand lies right after another in memory, as in a message
  const auto follows = [&](int64_t before, int64_t at) {
    if (programs.tensor[at] != programs.tensor[before] || programs.space[at] != programs.space[before]) return false;
    const int64_t row_bytes = heads(at, programs.heads[before]) * sizes.number_bytes[programs.tensor[at]];
    return programs.row[at] == programs.row[before] + programs.rows[before] &&
           programs.rows[before] * row_bytes % sizes.alignment == 0;
  };
  struct Latest {
    int64_t message = -1, operand = -1;  // the latest of a peer and a direction
  };
  int64_t peers = 0;
  for (int64_t tile = 0; tile < programs.peer.size(); ++tile) peers = std::max(peers, programs.peer[tile] + 1);
  const Array<Latest> latest(2 * peers);
  MessageGroups groups{Array<int32_t>(programs.peer.size()), {}, {}};
  programs.each_step([&](const Step& step) {
    if (step.list != TRANSFERS) return;
    // always staged: an all-to-all is one buffer, and results are rounded for transfer
    const bool always_staged = (programs.mode[step.index] & (ALL_TO_ALL | RESULTS)) != 0;
    const auto begin = groups.first.count();
    for (int64_t tile = step.first; tile < step.end; ++tile) {
      Latest& last = latest[2 * programs.peer[tile] + programs.send[tile]];
      const int64_t at = programs.operands.ptr[step.rank] + programs.operand[tile];
      const bool starts = last.message < begin;
      if (starts) {
        last.message = groups.first.count();
        groups.first.push_back(static_cast<int32_t>(tile));
        groups.staged.push_back(always_staged);
      }
      uint8_t& staged = groups.staged[last.message];
      if (!staged) staged = !(is_whole(step.rank, at) && (starts || follows(last.operand, at)));
      last.operand = at;
      groups.message[tile] = static_cast<int32_t>(last.message);
    }
  });
  return groups;
}

static const Area area("messages", [](nb::module_& m) {
  def(m, "group(arrays, sizes)", group);
});

}  // namespace apportion
