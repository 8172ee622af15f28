// State of a rank's home rows, by range and head. They hold their own tokens or none, so no tokens are recorded.
//
//   HomeState   live      heads with contributions          flight    heads being received
//               cleared   with zeros, to be added to        sent      heads already sent, now fixed
//               values    finished or computed              results   heads received as results
//               touched   true if any action other than receiving results and `finish` was applied to the rows
//
// A tensor has a place for every word of heads (`HeadSets`). Inputs of a program are not included.
#pragma once

#include "ir/verify/faults.hpp"
#include "ir/verify/program.hpp"
#include "ir/verify/nodes.hpp"

namespace apportion::verify {

// Actions on home rows, in order: put a partial; add one; put zeros; begin to receive rows; receive them completely;
// finish them; take a partial; take one, even a result, back through the projection; read values; send values; set
// values; put a result; receive a result.
enum class Action : uint8_t {
  PUT, ADD, CLEAR, RECEIVE, ARRIVE, FINISH, TAKE, PUSH_BACK, READ, SEND, SET, DELIVER, RECEIVE_RESULT
};

struct HomeState {
  Bits live = 0, cleared = 0, values = 0, flight = 0, sent = 0, results = 0;
  bool touched = false;
};

class HomeRows {
 public:
  explicit HomeRows(const HeadSets& heads)
      : heads_(heads), places_(static_cast<std::size_t>(heads.words() * TENSORS)) {}

  // address: of the rank's first row.
  void begin_rank(int64_t rows, int64_t address) {
    for (auto& nodes : places_) nodes.reset(rows);
    rows_ = rows;
    address_ = address;
  }
  Token token(int64_t row) const { return address_ + row; }

  // Applies an action; throws if it is not allowed.
  void apply(Action action, Tensor tensor, int64_t low, int64_t high, int64_t set) {
    for (int64_t word = 0; word < heads_.words(); ++word) {
      const Bits bits = heads_.bits_of(tensor, word, set);
      if (bits != 0) apply_to_word(action, tensor, word, low, high, bits);
    }
  }

  // Checks that all required rows are produced, and finished if necessary; and that rows with results have them in all
  // heads.
  void end_rank(Tensor tensor, bool is_output, bool is_finished) {
    for (int64_t word = 0; word < heads_.words(); ++word) {
      const Bits bits = heads_.bits_of(tensor, word, 0);
      if (bits == 0) continue;
      end_word(tensor, word, bits, is_output && rows_ > 0, is_finished);
      if (word != 0) compare_results(tensor, word, bits);
    }
  }

 private:
  Nodes<HomeState>& place(Tensor tensor, int64_t word) {
    return places_[static_cast<std::size_t>(word * TENSORS + static_cast<int64_t>(tensor))];
  }
  static Place rows_of(Tensor tensor, int64_t low, int64_t high) { return {tensor, Space::HOME, low, high}; }

  void apply_to_word(Action action, Tensor tensor, int64_t word, int64_t low, int64_t high, Bits bits) {
    Nodes<HomeState>& nodes = place(tensor, word);
    nodes.open();
    const bool is_partial = PARTIALS.has(tensor);
    nodes.each(action == Action::READ ? nodes.find(low) : nodes.slice(low, high), high, [&](auto& node) {
      if (action == Action::DELIVER || action == Action::RECEIVE_RESULT)
        node.results |= bits;
      else if (action != Action::ARRIVE && action != Action::FINISH)
        node.touched = true;
      if (node.touched && node.results != 0 && action != Action::PUSH_BACK) fail(Code::RESULT_TOUCHED, rows_of(tensor, low, high));
      if (!is_proper(action, node, bits)) blame(action, tensor, node, low, high, bits);
      change(action, node, bits, is_partial);
    });
  }

  template <class... Options>
  static bool is_any(Action action, Options... options) {
    return ((action == options) || ...);
  }

  static bool is_proper(Action action, const HomeState& state, Bits bits) {
    using enum Action;
    if (action == ARRIVE) return true;
    if (is_any(action, READ, SEND)) return (state.values & bits) == bits && (state.flight & bits) == 0;
    if (((state.flight | state.sent | state.values) & bits) != 0) return false;
    if (is_any(action, ADD, FINISH, TAKE, PUSH_BACK)) return ((state.live | state.cleared) & bits) == bits;
    return (state.live & bits) == 0;
  }

  static void change(Action action, HomeState& state, Bits bits, bool is_partial) {
    using enum Action;
    if (action == READ) return;
    if (action == SEND) {
      state.sent |= bits;
      return;
    }
    if (action == ARRIVE) {
      state.flight &= ~bits;
      (is_partial ? state.live : state.values) |= bits;
      return;
    }
    state.cleared &= ~bits;
    state.live &= ~bits;
    if (is_any(action, PUT, ADD, DELIVER)) state.live |= bits;
    if (action == CLEAR) state.cleared |= bits;
    if (is_any(action, FINISH, SET)) state.values |= bits;
    if (is_any(action, RECEIVE, RECEIVE_RESULT)) state.flight |= bits;
  }

  // Throws the fault of a node on which an action is not allowed.
  [[noreturn]] void blame(Action action, Tensor tensor, const Node<HomeState>& node, int64_t low, int64_t high,
                          Bits bits) const {
    const Place range = rows_of(tensor, std::max<int64_t>(low, node.low), std::min<int64_t>(high, node.high));
    const Token holds = token(range.low);
    const bool reads = action == Action::READ || action == Action::SEND;
    if ((node.flight & bits) != 0) fail(reads ? Code::READ_IN_FLIGHT : Code::WRITE_IN_FLIGHT, range, holds);
    if (reads) fail((node.live & bits) != 0 ? Code::READ_PARTIAL : Code::READ_UNWRITTEN, range, holds);
    if (((node.sent | node.values) & bits) != 0) fail(Code::WRITTEN_TWICE, range, holds);
    if (action == Action::FINISH && node.results != 0) fail_heads(range, node.results, bits);
    if (action == Action::ADD) fail(Code::ADD_TO_UNWRITTEN, range, holds);
    if (action == Action::FINISH || action == Action::TAKE || action == Action::PUSH_BACK)
      fail(Code::READ_UNWRITTEN, range, holds);
    fail(Code::PARTIAL_LOST, range, holds);
  }
  [[noreturn]] static void fail_heads(Place range, Bits results, Bits wanted) {
    fail(Code::RESULT_HEADS, range, static_cast<Token>(results), static_cast<Token>(wanted));
  }

  void end_word(Tensor tensor, int64_t word, Bits bits, bool is_output, bool is_finished) {
    Nodes<HomeState>& nodes = place(tensor, word);
    if (is_output && !nodes.is_open()) fail(Code::NOT_PRODUCED, rows_of(tensor, 0, rows_), token(0));
    nodes.each([&](auto& node) {
      const Place range = rows_of(tensor, node.low, node.high);
      if (node.results != 0 && node.results != bits) fail_heads(range, node.results, bits);
      if (!is_output && node.live != 0) fail(Code::PARTIAL_LEFT, range, token(node.low));
      if (!is_output) return;
      if (is_finished && node.values != bits)
        fail(node.live != 0 ? Code::NOT_FINISHED : Code::NOT_PRODUCED, range, token(node.low));
      if (!is_finished && (node.live | node.cleared) != bits) fail(Code::NOT_PRODUCED, range, token(node.low));
    });
  }

  // Checks that the same rows have results in the heads of a word as in the heads of the first word.
  void compare_results(Tensor tensor, int64_t word, Bits bits) {
    Nodes<HomeState>&first = place(tensor, 0), &other = place(tensor, word);
    if (!first.is_open() && !other.is_open()) return;
    first.open();
    other.open();
    for (NodeIndex i = first.first(), j = other.first(); i != NO_NODE && j != NO_NODE;) {
      const auto &a = first[i], &b = other[j];
      const int64_t low = std::max(a.low, b.low), high = std::min(a.high, b.high);
      if ((a.results == 0) != (b.results == 0)) fail_heads(rows_of(tensor, low, high), a.results | b.results, bits);
      if (a.high == high) i = a.after;
      if (b.high == high) j = b.after;
    }
  }

  const HeadSets& heads_;
  std::vector<Nodes<HomeState>> places_;
  int64_t rows_ = 0;
  Token address_ = 0;
};

}  // namespace apportion::verify
