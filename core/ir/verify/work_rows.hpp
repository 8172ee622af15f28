// Work rows of a rank: arenas, each cut into ranges of one state, one token per row and one set of heads.
//
//   WorkState   state   contents of the rows
//               shift   the token of a row minus its number
//               heads   the number of the rows' head set, equal for equal sets
//               fill_round  the round that receives the rows; senders: the rounds that send them
//
// Adding a token to a different one creates the condition that both are equal (`settle.hpp`), or is a
// fault if both are known.
//
// Rounds that the current rank has launched or completed, and the rounds that still send the rows of a node.
//
//   rounds   number ─► launched by this rank? waited for? its transfers [first, end)
//   senders  of a node: round 7 ─► round 4 ─► none         the parts of a cut node share one list
//
// Completed rounds stay completed: they are unlinked when encountered.
#pragma once

#include "ir/verify/faults.hpp"
#include "ir/verify/nodes.hpp"

namespace apportion::verify {

using RoundNumber = int32_t;
inline constexpr RoundNumber NO_ROUND = -1;
using Senders = int32_t;
inline constexpr Senders NO_SENDERS = -1;

struct Round {
  int32_t walk = -1;  // the last walk that launched it; other fields are valid in that walk only
  bool is_over = false, fills_home = false;
  int64_t first = 0, end = 0;
};

class Rounds {
 public:
  explicit Rounds(int64_t count) : rounds_(static_cast<std::size_t>(count)) {}

  void begin_rank() {
    ++walk_;
    last_ = NO_ROUND;
    in_flight_ = 0;
    links_.clear();
  }

  // Numbers ascend.
  void launch(RoundNumber number, int64_t first, int64_t end) {
    require(number > last_);
    last_ = number;
    ++in_flight_;
    at(number) = {walk_, false, false, first, end};
  }
  const Round& wait(RoundNumber number) {
    Round& round = at(number);
    require(round.walk == walk_ && !round.is_over);
    round.is_over = true;
    --in_flight_;
    return round;
  }
  void fill_home(RoundNumber number) { at(number).fills_home = true; }
  int64_t in_flight() const { return in_flight_; }

  // True if the rank has waited for the round, or if there is none.
  bool is_over(RoundNumber number) { return number == NO_ROUND || at(number).is_over; }

  // True if one of these rounds is in flight.
  bool is_sending(Senders& senders) {
    Senders pending = senders;
    while (pending != NO_SENDERS && is_over(link(pending).round)) pending = link(pending).next;
    while (senders != pending) senders = std::exchange(link(senders).next, pending);
    return senders != NO_SENDERS;
  }
  // The same rounds, and one more.
  Senders with(Senders senders, RoundNumber number) {
    if (is_sending(senders) && link(senders).round == number) return senders;
    links_.push_back({number, senders});
    return static_cast<Senders>(links_.size() - 1);
  }

 private:
  struct Link {
    RoundNumber round;
    Senders next;
  };
  Round& at(RoundNumber number) { return rounds_[static_cast<std::size_t>(number)]; }
  Link& link(Senders senders) { return links_[static_cast<std::size_t>(senders)]; }

  std::vector<Round> rounds_;
  std::vector<Link> links_;
  int32_t walk_ = 0;
  int64_t in_flight_ = 0;
  RoundNumber last_ = NO_ROUND;
};

struct WorkState {
  int64_t shift = 0;
  int32_t heads = 0;
  RoundNumber fill_round = NO_ROUND;
  Senders senders = NO_SENDERS;
  State state = State::EMPTY;

  bool holds_tokens() const { return state == State::LIVE || state == State::VALUE; }
};

// Rows of a tensor's arena, and the number of a head set.
struct WorkPlace {
  Tensor tensor;
  int32_t heads;
  int64_t low, high;
};

class WorkRows {
 public:
  WorkRows(Rounds& rounds, Conditions& conditions) : rounds_(rounds), conditions_(conditions) {}

  // rows: of each tensor's arena.
  template <class Rows>
  void begin_rank(const Rows& rows) {
    for (int64_t tensor = 0; tensor < TENSORS; ++tensor) arenas_[static_cast<std::size_t>(tensor)].reset(rows[tensor]);
  }

  // Overwrites rows, which must neither hold a partial nor be in flight. fill_round: the round that receives the new
  // contents.
  void put(const WorkPlace& place, State state, Token token, RoundNumber fill_round = NO_ROUND) {
    auto& nodes = open_arena(place.tensor);
    const NodeIndex first = nodes.slice(place.low, place.high);
    nodes.each(first, place.high, [&](auto& node) {
      if (node.state == State::LIVE || !is_idle(node)) blame(place, node, Use::PUT);
    });
    static_cast<WorkState&>(nodes.absorb(first, place.high)) = {
        token == NOWHERE ? NOWHERE : token - place.low, place.heads, fill_round, NO_SENDERS, state};
  }

  // Adds a partial to partials; CLEARED rows count as empty.
  void add(const WorkPlace& place, State state, Token token) {
    auto& nodes = open_arena(place.tensor);
    NodeIndex at = nodes.find(place.low);
    for (int64_t low = place.low; low < place.high;) {
      const int64_t high = std::min<int64_t>(place.high, nodes[at].high);
      const bool is_live = nodes[at].state == State::LIVE;
      if (nodes[at].heads != place.heads || !is_idle(nodes[at]) || !(is_live || nodes[at].state == State::CLEARED))
        blame(place, nodes[at], Use::ADD);
      if (state == State::LIVE && !is_live) {
        if (nodes[at].low < low || nodes[at].high > high) at = nodes.slice(low, high);
        nodes[at].state = State::LIVE;
        nodes[at].shift = token - place.low;
      } else if (state == State::LIVE) {
        add_tokens({place.tensor, Space::WORK, low, high}, nodes[at], token + low - place.low);
      }
      low = nodes[at].high;
      at = nodes[at].after;
    }
  }

  // Fills `runs` with the contents of rows: values, or partials if `values` is false.
  void read(const WorkPlace& place, bool values, Runs& runs) {
    auto& nodes = arena(place.tensor);
    if (!nodes.is_open()) fail(Code::READ_UNWRITTEN, whole(place));
    runs.clear();
    NodeIndex at = nodes.find(place.low);
    for (int64_t row = place.low; row < place.high;) {
      const auto& node = nodes[at];
      const bool fits = values ? node.state == State::VALUE : node.state == State::LIVE || node.state == State::CLEARED;
      if (!fits || node.heads != place.heads || !rounds_.is_over(node.fill_round)) blame(place, node, Use::READ);
      const Token token = node.state == State::CLEARED ? NOWHERE : row + node.shift;
      const int64_t stop = std::min<int64_t>(place.high, node.high);
      if (!runs.empty() && runs.back().state == node.state && runs.back().next() == token)
        runs.back().rows += static_cast<int32_t>(stop - row);
      else
        runs.push_back(run_of(row - place.low, stop - row, token, node.state));
      row = stop;
      at = node.after;
    }
  }

  // Consumes partials, which no other round may be sending. round: the round that sends them, if any.
  void spend(const WorkPlace& place, RoundNumber round = NO_ROUND) {
    auto& nodes = arena(place.tensor);
    const NodeIndex first = nodes.slice(place.low, place.high);
    nodes.each(first, place.high, [&](auto& node) { require(is_idle(node)); });
    WorkState& state = nodes.absorb(first, place.high);
    state.state = State::SPENT;
    state.fill_round = NO_ROUND;
    state.senders = round == NO_ROUND ? NO_SENDERS : rounds_.with(NO_SENDERS, round);
  }

  // Marks values as sent in a round; they remain.
  void mark_sent(const WorkPlace& place, RoundNumber round) {
    auto& nodes = arena(place.tensor);
    nodes.each(nodes.find(place.low), place.high,
               [&](auto& node) { node.senders = rounds_.with(node.senders, round); });
  }

  // Checks that no partial is left.
  void end_rank(Tensor tensor) {
    arena(tensor).each([&](auto& node) {
      if (node.state == State::LIVE)
        fail(Code::PARTIAL_LEFT, {tensor, Space::WORK, node.low, node.high}, node.low + node.shift);
    });
  }

 private:
  enum class Use : uint8_t { READ, ADD, PUT };

  Nodes<WorkState>& arena(Tensor tensor) { return arenas_[static_cast<std::size_t>(tensor)]; }
  Nodes<WorkState>& open_arena(Tensor tensor) {
    arena(tensor).open();
    return arena(tensor);
  }
  static Place whole(const WorkPlace& place) { return {place.tensor, Space::WORK, place.low, place.high}; }

  // True if rows are neither being received nor being sent.
  bool is_idle(WorkState& state) { return rounds_.is_over(state.fill_round) && !rounds_.is_sending(state.senders); }

  // Adds a token to a node; of two different tokens, keeps the less uncertain one.
  void add_tokens(Place place, Node<WorkState>& node, Token token) {
    const Token current = place.low + node.shift;
    if (current == token) return;
    const bool is_better =
        uncertainty(token) < uncertainty(current) && node.low == place.low && node.high == place.high;
    if (is_better) node.shift = token - place.low;
    conditions_.require_same({is_better ? current : token, is_better ? token : current, Code::PARTIAL_MIXED, !is_better, place});
  }

  // Throws the fault of a node that cannot be read, added to or overwritten.
  [[noreturn]] void blame(const WorkPlace& wanted, const Node<WorkState>& node, Use use) {
    const Place place{wanted.tensor, Space::WORK, std::max<int64_t>(wanted.low, node.low), std::min<int64_t>(wanted.high, node.high)};
    const Token holds = node.holds_tokens() ? place.low + node.shift : NOWHERE;
    if (!rounds_.is_over(node.fill_round))
      fail(use == Use::READ ? Code::READ_IN_FLIGHT : Code::WRITE_IN_FLIGHT, place, holds);
    if (use == Use::PUT) fail(node.state == State::LIVE ? Code::PARTIAL_LOST : Code::WRITE_SENDING, place, holds);
    if (node.state == State::SPENT) fail(Code::PARTIAL_SPENT, place, holds);
    if (node.state == State::EMPTY)
      fail(use == Use::READ ? Code::READ_UNWRITTEN : Code::ADD_TO_UNWRITTEN, place, holds);
    if (node.heads != wanted.heads) fail(Code::READ_OTHER_HEADS, place, node.heads, wanted.heads);
    fail(use == Use::READ ? Code::READ_PARTIAL : Code::WRITE_SENDING, place, holds);
  }

  Rounds& rounds_;
  Conditions& conditions_;
  std::array<Nodes<WorkState>, TENSORS> arenas_;
};

}  // namespace apportion::verify
