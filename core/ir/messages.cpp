// Groups the transfers of a launch into messages.
#include "ir/messages.hpp"

#include "bind.hpp"

namespace apportion {

using std::int32_t;
using std::int64_t;

namespace {

class Operands {
 public:
  Operands(const Programs& programs, const RowSizes& sizes)
      : programs_(programs), sizes_(sizes), arena_heads_(programs.ranks(), TENSORS) {
    const Table& arenas = programs.arenas;
    for (int64_t rank = 0; rank < programs.ranks(); ++rank)
      for (int64_t at = arenas.ptr[rank]; at < arenas.ptr[rank + 1]; ++at)
        arena_heads_[rank][arenas.columns[0][at]] = arenas.columns[2][at];
  }

  // True if an operand has all columns of one array, whose numbers travel unchanged.
  bool is_whole(int64_t rank, int64_t at) {
    const Tensor tensor = programs_.tensor_of(at);
    const int64_t number = programs_.tensor[at], set = programs_.heads[at];
    if (!sizes_.one_array[2 * number + programs_.space[at]]) return false;
    if (!programs_.is_home(at)) return HEADLESS.has(tensor) || sizes_.heads.of(tensor, set) == arena_heads_[rank][number];
    return sizes_.ordered[set] && sizes_.heads.of(tensor, set) == sizes_.heads.of(tensor, 0);
  }

  // True if one operand lies right after another in memory, as in a message.
  bool follows(int64_t before, int64_t at) const {
    const Programs& data = programs_;
    if (data.tensor[at] != data.tensor[before] || data.space[at] != data.space[before]) return false;
    const int64_t row_bytes = sizes_.heads.of(data.tensor_of(at), data.heads[before]) * sizes_.number_bytes[data.tensor[at]];
    return data.row[at] == data.row[before] + data.rows[before] && data.rows[before] * row_bytes % sizes_.alignment == 0;
  }

 private:
  const Programs& programs_;
  const RowSizes& sizes_;
  Array2<int64_t> arena_heads_;
};

}  // namespace

// Forms one message per peer and direction of each launch.
MessageGroups group(const Programs& programs, const RowSizes& sizes) {
  Operands operands(programs, sizes);
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
      std::uint8_t& staged = groups.staged[last.message];
      if (!staged) staged = !(operands.is_whole(step.rank, at) && (starts || operands.follows(last.operand, at)));
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
