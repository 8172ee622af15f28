// Groups the transfers of a launch into messages.
#include <vector>

#include "bind.hpp"

namespace apportion {

using std::int32_t;
using std::int64_t;

namespace {

constexpr int64_t HOME = 0;

// Where operands lie: `_OperandMemory` of apportion/ir/plan/messages.py. width: [ranks, tensors * 2].
struct Memory {
  Ints tensor, space, row, rows, heads;
  Matrix<const int64_t> columns, row_bytes, width;
  Column<const bool> ordered;
  int64_t alignment;

  // Whether an operand has all the columns of one array.
  bool is_whole(int64_t rank, int64_t at) const {
    const bool in_order = space[at] != HOME || ordered[heads[at]];
    return in_order && columns[tensor[at]][heads[at]] == width[rank][2 * tensor[at] + space[at]];
  }

  // Whether one operand lies right behind another in memory, as in a message.
  bool follows(int64_t before, int64_t at) const {
    if (tensor[at] != tensor[before] || space[at] != space[before]) return false;
    const int64_t bytes = rows[before] * row_bytes[tensor[at]][heads[before]];
    return row[at] == row[before] + rows[before] && bytes % alignment == 0;
  }
};

// Launches and their transfers, rank after rank: `_LaunchLists`.
struct Launches {
  Column<const int64_t> tiles, rank, first;
  Column<const bool> swapped;
  Ints send, peer, operand;
};

// Launch after launch; to each peer, and from it, a launch has one message. Returns the number of messages.
int64_t group(const Launches& lists, const Memory& memory, int64_t ranks, Column<int32_t> of, Column<int32_t> first,
              Column<bool> staged) {
  std::vector<int64_t> newest_of(static_cast<std::size_t>(2 * ranks), -1), last_of(newest_of);
  const Column<int64_t> newest(newest_of.data(), 2 * ranks), last(last_of.data(), 2 * ranks);
  int64_t found = 0, tile = 0;
  for (int64_t launch = 0; launch < lists.tiles.size(); ++launch) {
    const int64_t begin = found, end_of_launch = tile + lists.tiles[launch];
    for (; tile < end_of_launch; ++tile) {
      const int64_t end = lists.send[tile] * ranks + lists.peer[tile];
      const int64_t at = lists.first[launch] + lists.operand[tile];
      const bool starts = newest[end] < begin;
      if (starts) {
        newest[end] = found;
        first[found] = static_cast<int32_t>(tile);
        staged[found] = lists.swapped[launch];
        ++found;
      }
      const int64_t number = newest[end];
      if (!staged[number]) {
        const bool direct = memory.is_whole(lists.rank[launch], at) && (starts || memory.follows(last[end], at));
        staged[number] = !direct;
      }
      last[end] = at;
      of[tile] = static_cast<int32_t>(number);
    }
  }
  return found;
}

}  // namespace

void bind_messages(nb::module_& m) {
  m.def("group", [](nb::tuple lists, nb::tuple memory, int64_t ranks, int64_t alignment) {
    Fields of_lists(lists), of_memory(memory);
    const Launches launches{
        of_lists.next<Column<const int64_t>>("tiles"),
        of_lists.next<Column<const int64_t>>("rank"),
        of_lists.next<Column<const int64_t>>("first"),
        of_lists.next<Column<const bool>>("swapped"),
        of_lists.next<Ints>("send"),
        of_lists.next<Ints>("peer"),
        of_lists.next<Ints>("operand"),
    };
    const Memory where{
        of_memory.next<Ints>("tensor"),
        of_memory.next<Ints>("space"),
        of_memory.next<Ints>("row"),
        of_memory.next<Ints>("rows"),
        of_memory.next<Ints>("heads"),
        of_memory.next<Matrix<const int64_t>>("columns"),
        of_memory.next<Matrix<const int64_t>>("row_bytes"),
        of_memory.next<Matrix<const int64_t>>("width"),
        of_memory.next<Column<const bool>>("ordered"),
        alignment,
    };
    const int64_t transfers = launches.send.size();
    New<int32_t> of(transfers), first(transfers);
    New<bool> staged(transfers);
    const int64_t found = unlocked([&] { return group(launches, where, ranks, of, first, staged); });
    const nb::slice some(found);
    return nb::make_tuple(of.array(), first.array()[some], staged.array()[some]);
  });
}

}  // namespace apportion
