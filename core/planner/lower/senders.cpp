// A round that would take longer because several NICs send to one becomes several rounds, with their launches and waits
// in its place:
//
//   launch r: from a, b, c      pieces, longest first, are coloured: each NIC sends and receives at most one per colour
//        ▼                                      0: a        1: b        2: c
//   launch r: from a, b         combines the number of colours that is fastest by the network's figures
//   launch r + 1: from c
//
// Pieces are single tiles, or all tiles of a pair of NICs, whichever is faster; tiles within a node go in the first
// round.
#include "planner/lower/given.hpp"
#include "planner/lower/program.hpp"

#include "planner/matching.hpp"

namespace apportion::lower {

namespace {

// A tile that a NIC sends to another. send, receive: its transfers.
struct Tile {
  int64_t out, in, send, receive;
  double us;

  std::pair<int64_t, int64_t> pair() const { return {out, in}; }
};

// Adjacent tiles from one NIC to another.
struct Piece {
  int64_t out, in, first, tiles;
  double us;
  int32_t colour;

  std::pair<int64_t, int64_t> pair() const { return {out, in}; }
};

// How the pieces of a round are sent: with `together` colours per new round; us: the total time of these rounds.
struct Way {
  Growing<Piece> pieces;
  int64_t colours = 1, together = 1;
  double us = 0;

  int64_t rounds() const { return (colours - 1) / together + 1; }
};

class Ways {
 public:
  Ways(const Network& network, int64_t ranks) : network_(network), nics_(network.nic(ranks - 1) + 1) {}

  // The fastest way to send tiles; the tiles are sorted by pair.
  Way fastest(const Growing<Tile>& tiles) const {
    Way best = in_pieces(tiles, true);
    if (best.colours < 2) return best;
    const Way pairs = best;
    best.together = best.colours;
    best.us = time_us(best.pieces, best.together);
    try_all(pairs, best);
    if (pairs.pieces.count() < tiles.count()) try_all(in_pieces(tiles, false), best);
    return best;
  }

 private:
  struct Nic {
    int64_t peer_count = 0;
    double us = 0;
  };

  // Cuts tiles into pieces, colours them, and sorts them by colour.
  Way in_pieces(const Growing<Tile>& tiles, bool by_pair) const {
    Way way;
    for (int64_t at = 0; at < tiles.count(); ++at) {
      const Tile& tile = tiles[at];
      if (by_pair && !way.pieces.empty() && way.pieces.back().pair() == tile.pair()) {
        ++way.pieces.back().tiles;
        way.pieces.back().us += tile.us;
      } else {
        way.pieces.push_back({tile.out, tile.in, at, 1, tile.us, 0});
      }
    }
    std::ranges::stable_sort(way.pieces, std::greater(), &Piece::us);
    Growing<int64_t> out, in, sent(nics_), received(nics_);
    for (const Piece& piece : way.pieces) {
      out.push_back(piece.out);
      in.push_back(piece.in);
      way.colours = std::max({way.colours, ++sent[piece.out], ++received[piece.in]});
    }
    const Array<int32_t> colour =
        colour_edges({out.data(), false, out.count()}, {in.data(), false, in.count()}, nics_, way.colours);
    for (int64_t at = 0; at < out.count(); ++at) way.pieces[at].colour = colour[at];
    std::ranges::stable_sort(way.pieces, {}, &Piece::colour);
    return way;
  }

  void try_all(Way way, Way& best) const {
    for (way.together = 1; way.together < way.colours; way.together *= 2) {
      way.us = time_us(way.pieces, way.together) + real(way.rounds() - 1) * network_.round_us;
      if (way.us < best.us) best = way;
    }
  }

  // The time of rounds of `together` colours, one after another, each as long as its busiest NIC takes.
  double time_us(const Growing<Piece>& pieces, int64_t together) const {
    double total = 0;
    Growing<Piece> round;
    for (int64_t at = 0; at < pieces.count(); ++at) {
      round.push_back(pieces[at]);
      if (at + 1 < pieces.count() && pieces[at + 1].colour / together == pieces[at].colour / together) continue;
      total += round_us(round);
      round.clear();
    }
    return total;
  }

  double round_us(Growing<Piece>& pieces) const {
    std::ranges::sort(pieces, {}, &Piece::pair);
    Growing<Nic> out(nics_), in(nics_);
    for (int64_t at = 0; at < pieces.count(); ++at) {
      if (at > 0 && pieces[at].pair() == pieces[at - 1].pair()) continue;
      ++out[pieces[at].out].peer_count;
      ++in[pieces[at].in].peer_count;
    }
    double longest = 0;
    for (const Piece& piece : pieces) {
      Nic &from = out[piece.out], &to = in[piece.in];
      const double us = piece.us * factor(from.peer_count, to.peer_count);
      longest = std::max({longest, from.us += us, to.us += us});
    }
    return longest;
  }

  double factor(int64_t receivers, int64_t senders) const {
    if (receivers == 1 && senders == 1) return 1 / network_.one_peer;
    return 1 + network_.incast * std::min(real(senders - 1), network_.peers);
  }

  const Network& network_;
  int64_t nics_;
};

// The tiles of each step that travel between nodes, sorted by pair of NICs and of ranks.
class Tiles {
 public:
  Tiles(const Program& program, const Lowering& low, const Network& network)
      : transfers_(program.transfers), low_(low), network_(network), sent_(program.steps.count()), received_(sent_) {
    for (int64_t at = 0; at < transfers_.count(); ++at) {
      const Transfer& row = transfers_[at];
      if (network.node(row.rank) != network.node(row.peer)) (row.send ? sent_ : received_)[row.step].push_back(at);
    }
  }

  Growing<Tile> of(int64_t step) {
    // the k-th tile that one rank sends to another is the k-th tile that the other receives from it
    sort(sent_[step]);
    sort(received_[step]);
    Growing<Tile> tiles;
    for (int64_t at = 0; at < sent_[step].count(); ++at) {
      const int64_t send = sent_[step][at];
      const Transfer& row = transfers_[send];
      tiles.push_back({network_.nic(row.rank), network_.nic(row.peer), send, received_[step][at], us(row)});
    }
    std::ranges::stable_sort(tiles, {}, &Tile::pair);
    return tiles;
  }

 private:
  std::pair<int32_t, int32_t> ends(int64_t at) const {
    const Transfer& row = transfers_[at];
    return row.send ? std::pair(row.rank, row.peer) : std::pair(row.peer, row.rank);
  }
  void sort(Growing<int64_t>& numbers) const {
    std::ranges::stable_sort(numbers, {}, [&](int64_t at) { return ends(at); });
  }
  double us(const Transfer& row) const {
    const Tensor tensor = row.operand.tensor();
    int64_t heads = (KV_SIDE.has(tensor) ? low_.sets.key_columns : low_.sets.query_heads)[row.rank];
    if (HEADLESS.has(tensor)) heads = 1;
    return real(row.operand.rows() * heads * network_.sent[static_cast<int64_t>(tensor)]) * network_.byte_us;
  }

  const Growing<Transfer>& transfers_;
  const Lowering& low_;
  const Network& network_;
  Growing<Growing<int64_t>> sent_, received_;
};

}  // namespace

void bound_senders(Program& program, const Lowering& low, const Network& network) {
  Tiles tiles(program, low, network);
  const Ways ways(network, low.groups.ranks());
  Growing<int32_t> part(program.transfers.count());  // for each transfer, which of the rounds of its step
  const auto split = [&](int64_t step) {
    const Growing<Tile> current = tiles.of(step);
    const Way way = ways.fastest(current);
    for (const Piece& piece : way.pieces)
      for (int64_t at = piece.first; at < piece.first + piece.tiles; ++at)
        part[current[at].send] = part[current[at].receive] = narrow(piece.colour / way.together);
    return way.rounds();
  };
  Growing<Step> steps;
  Growing<int64_t> first, counts;  // for each original step, its first new step and their number
  program.rounds = 0;
  for (const Step& step : program.steps) {
    const int64_t current = first.count();
    first.push_back(steps.count());
    counts.push_back(step.op == Op::LAUNCH ? split(current) : step.op == Op::WAIT ? counts[step.launch] : 1);
    for (int64_t at = 0; at < counts[current]; ++at) {
      Step part_step = step;
      if (step.op == Op::LAUNCH) part_step.round = program.rounds++;
      if (step.op == Op::LAUNCH && counts[current] > 1) part_step.mode &= ~ALL_TO_ALL;
      if (step.op == Op::WAIT) {
        part_step.launch = first[step.launch] + at;
        part_step.round = steps[part_step.launch].round;
      }
      steps.push_back(part_step);
    }
  }
  program.steps = std::move(steps);
  for (int64_t at = 0; at < part.count(); ++at) {
    Transfer& row = program.transfers[at];
    row.step = narrow(first[row.step] + part[at]);
  }
  for (Attention& row : program.attention) row.step = narrow(first[row.step]);
  for (RowOp& row : program.rowops) row.step = narrow(first[row.step]);
}

}  // namespace apportion::lower
