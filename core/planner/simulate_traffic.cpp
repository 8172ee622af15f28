// Simulated transfers of a program: ports, and the cost of posting and packing.
#include <array>

#include "bind.hpp"
#include "ir/sorting.hpp"
#include "planner/scratch.hpp"

namespace apportion {

using std::int64_t;

namespace {

// Transfers as listed, rank after rank: `Tiles` of apportion/planner/simulate/program.py.
struct Tiles {
  Column<const int64_t> launch;             // of transfers, as the next three
  Ints send, peer, operand;                 // an operand by its number on its rank
  Column<const int64_t> rank, round, first;  // of launches, as the next; where the operands of the rank begin
  Column<const bool> results;               // whether what travels are results
  Column<const int64_t> bytes;              // of operands
  Matrix<const int64_t> wire;               // what an operand takes on its way, and as a result
  Column<const int64_t> tensor;             // of operands

  int64_t operand_of(int64_t tile) const { return first[launch[tile]] + operand[tile]; }
};

// The cluster: `_Links` of apportion/planner/simulate/traffic.py; [0] is within a node, [1] between nodes.
struct Links {
  Column<const int64_t> node;
  Matrix<const int64_t> out, in;  // ports, by rank
  Column<const double> rate, latency_us;
};

// Of transfers: `Traffic` of apportion/planner/simulate/program.py.
struct Found {
  Column<int64_t> sender, receiver, out_port, in_port;
  Column<double> wire_us, latency_us;
  Column<int64_t> bytes, tensor;
};

// Sends by round, by how far the receiver is behind the sender in the circle of ranks, by sender.
Scratch<int64_t> ordered_sends(const Tiles& tiles, int64_t ranks) {
  std::vector<int64_t> sends, keys;
  for (int64_t tile = 0; tile < tiles.send.size(); ++tile) {
    if (tiles.send[tile] == 0) continue;
    const int64_t launch = tiles.launch[tile], source = tiles.rank[launch], shift = tiles.peer[tile] - source;
    sends.push_back(tile);
    keys.push_back((tiles.round[launch] * ranks + (shift < 0 ? shift + ranks : shift)) * ranks + source);
  }
  Scratch<int64_t> order(static_cast<int64_t>(keys.size()));
  stable_order({keys.data(), order.size()}, order);
  for (int64_t& at : order) at = sends[static_cast<std::size_t>(at)];
  return order;
}

void meet(const Tiles& tiles, Column<const int64_t> mate, const Links& links, Column<const double> post_us,
          const Scratch<int64_t>& sends, const Found& found) {
  for (int64_t i = 0; i < sends.size(); ++i) {
    const int64_t sender = tiles.launch[sends[i]], receiver = tiles.launch[mate[sends[i]]];
    const int64_t source = tiles.rank[sender], target = tiles.rank[receiver], operand = tiles.operand_of(sends[i]);
    const bool far = links.node[source] != links.node[target];
    found.sender[i] = sender;
    found.receiver[i] = receiver;
    found.out_port[i] = links.out[far][source];
    found.in_port[i] = links.in[far][target];
    found.bytes[i] = tiles.wire[tiles.results[sender]][operand];
    found.tensor[i] = tiles.tensor[operand];
    found.wire_us[i] = static_cast<double>(found.bytes[i]) / links.rate[far];
    found.latency_us[i] = links.latency_us[far] + std::max(post_us[sender], post_us[receiver]);
  }
}

// Bytes that are read and written to copy a tile into its message, or out of it; in_place: rows that are there already.
// Tiles are rounded as they are packed, and results where they arrive.
int64_t copied_bytes(const Tiles& tiles, int64_t tile, int64_t rows, int64_t in_place) {
  const int64_t operand = tiles.operand_of(tile);
  const bool results = tiles.results[tiles.launch[tile]];
  const int64_t wire = tiles.wire[results][operand];
  const int64_t held = results && tiles.send[tile] == 0 ? wire : tiles.bytes[operand];
  return (held + wire) / std::max<int64_t>(rows, 1) * (rows - in_place);
}

Tiles tiles_of(Fields& of) {
  return {
      of.next<Column<const int64_t>>("launch"), of.next<Ints>("send"),
      of.next<Ints>("peer"),                    of.next<Ints>("operand"),
      of.next<Column<const int64_t>>("rank"),   of.next<Column<const int64_t>>("round"),
      of.next<Column<const int64_t>>("first"),  of.next<Column<const bool>>("results"),
      of.next<Column<const int64_t>>("bytes"),  of.next<Matrix<const int64_t>>("wire"),
      of.next<Column<const int64_t>>("tensor"),
  };
}

}  // namespace

void bind_traffic(nb::module_& m) {
  m.def("meet", [](nb::tuple tiles, In<int64_t, "mate"> mate, int64_t ranks, nb::tuple links,
                   In<double, "post_us"> post_us) {
    Fields of_tiles(tiles), of_links(links);
    const Tiles moved = tiles_of(of_tiles);
    const Links cluster{
        of_links.next<Column<const int64_t>>("node"),  of_links.next<Matrix<const int64_t>>("out"),
        of_links.next<Matrix<const int64_t>>("into"),  of_links.next<Column<const double>>("rate"),
        of_links.next<Column<const double>>("latency_us"),
    };
    const Scratch<int64_t> sends = unlocked([&] { return ordered_sends(moved, ranks); });
    const int64_t count = sends.size();
    New<int64_t> sender(count), receiver(count), out_port(count), in_port(count), bytes(count), tensor(count);
    New<double> wire_us(count), latency_us(count);
    unlocked([&] {
      meet(moved, mate, cluster, post_us, sends,
           {sender, receiver, out_port, in_port, wire_us, latency_us, bytes, tensor});
    });
    return nb::make_tuple(sender.array(), receiver.array(), out_port.array(), in_port.array(), wire_us.array(),
                          latency_us.array(), bytes.array(), tensor.array());
  });

  m.def("posted", [](nb::tuple tiles, In<std::int32_t, "message"> message, In<std::int32_t, "first"> first,
                     In<bool, "staged"> staged, In<int64_t, "rows"> rows, In<int64_t, "in_place"> in_place) {
    Fields of_tiles(tiles);
    const Tiles moved = tiles_of(of_tiles);
    const int64_t launches = moved.rank.size();
    New<int64_t> messages(launches), packed(launches), unpacked(launches);
    unlocked([&] {
      for (const Column<int64_t>& one : {Column<int64_t>(messages), Column<int64_t>(packed), Column<int64_t>(unpacked)})
        std::fill(one.begin(), one.end(), 0);
      for (const int64_t tile : first) ++messages[moved.launch[tile]];
      for (int64_t tile = 0; tile < message.size(); ++tile) {
        if (!staged[message[tile]]) continue;
        const Column<int64_t>& copied = moved.send[tile] != 0 ? packed : unpacked;
        copied[moved.launch[tile]] += copied_bytes(moved, tile, rows[moved.operand_of(tile)], in_place[tile]);
      }
    });
    return nb::make_tuple(messages.array(), packed.array(), unpacked.array());
  });
}

}  // namespace apportion
