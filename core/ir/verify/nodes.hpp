// Rows [0, rows) of a place, cut into ranges of one state each: a list, found through an index.
//
//   index    0       1       2       3        the node that has row i << shift
//            │       │       │       │
//   nodes   [0 .. 5) [5 .. 6) [6 ..      ..) [30 .. 32)       low, high, State; after, before
//
// A place opens with one node, the default State; `slice` cuts nodes at the ends of a range, `absorb` joins equal
// neighbours. Nodes are reused by the next rank.
#pragma once

#include "array.hpp"

namespace apportion::verify {

using NodeIndex = int32_t;
inline constexpr NodeIndex NO_NODE = -1;

template <class State>
struct Node : State {
  int32_t low, high;
  NodeIndex after, before;
};

template <class State>
class Nodes {
 public:
  // Closes the place and sets its number of rows, capped at 2^31 - 1: operands end before that.
  void reset(int64_t rows) {
    rows_ = std::min<int64_t>(rows, std::numeric_limits<int32_t>::max());
    nodes_.clear();
    unused_ = NO_NODE;
  }
  int64_t rows() const { return rows_; }
  bool is_open() const { return !nodes_.empty(); }
  void open() {
    if (is_open()) return;
    nodes_.push_back({State{}, 0, static_cast<int32_t>(rows_), NO_NODE, NO_NODE});
    shift_ = 0;
    while ((rows_ - 1) >> shift_ >= MAX_INDEXED) ++shift_;
    index_.assign(static_cast<std::size_t>((rows_ - 1) >> shift_) + 1, 0);
  }

  Node<State>& operator[](NodeIndex node) {
    check_index(node, static_cast<int64_t>(nodes_.size()));
    return nodes_[static_cast<std::size_t>(node)];
  }
  // The first node of an open place; NO_NODE if it is closed.
  NodeIndex first() { return is_open() ? find(0) : NO_NODE; }

  // The node that contains a row of an open place.
  NodeIndex find(int64_t row) {
    NodeIndex node = index_[static_cast<std::size_t>(row >> shift_)];
    while ((*this)[node].low > row) node = (*this)[node].before;
    while ((*this)[node].high <= row) node = (*this)[node].after;
    return node;
  }

  // The first of the nodes that cover exactly rows [low, high), cut if necessary.
  NodeIndex slice(int64_t low, int64_t high) {
    NodeIndex first = find(low);
    if ((*this)[first].low < low) first = (*this)[split(first, low)].after;
    NodeIndex last = first;
    while ((*this)[last].high < high) last = (*this)[last].after;
    if ((*this)[last].high > high) {
      const NodeIndex left = split(last, high);
      if (last == first) first = left;
    }
    return first;
  }

  // Calls visit(node) for `first` and the following nodes that begin before `high`.
  template <class Visit>
  void each(NodeIndex first, int64_t high, Visit&& visit) {
    for (NodeIndex at = first; at != NO_NODE && (*this)[at].low < high;) {
      Node<State>& node = (*this)[at];
      at = node.after;
      visit(node);
    }
  }
  template <class Visit>
  void each(Visit&& visit) {
    each(first(), rows_, visit);
  }

  // Extends a node up to row `high`, over the nodes after it.
  Node<State>& absorb(NodeIndex node, int64_t high) {
    Node<State>& kept = (*this)[node];
    if (kept.high == high) return kept;
    const int64_t low = kept.high;
    NodeIndex other = kept.after;
    while (other != NO_NODE && (*this)[other].low < high) {
      const NodeIndex after = (*this)[other].after;
      (*this)[other].after = unused_;
      unused_ = other;
      other = after;
    }
    kept.high = static_cast<int32_t>(high);
    kept.after = other;
    if (other != NO_NODE) (*this)[other].before = node;
    point(node, low, high);
    return kept;
  }

 private:
  static constexpr int64_t MAX_INDEXED = 2048;

  void point(NodeIndex node, int64_t low, int64_t high) {
    std::fill(index_.begin() + (low >> shift_), index_.begin() + ((high - 1) >> shift_) + 1, node);
  }

  NodeIndex copy_of(NodeIndex node) {
    const Node<State> copied = (*this)[node];
    if (unused_ == NO_NODE) {
      nodes_.push_back(copied);
      return static_cast<NodeIndex>(nodes_.size() - 1);
    }
    const NodeIndex slot = unused_;
    unused_ = (*this)[slot].after;
    (*this)[slot] = copied;
    return slot;
  }

  // Cuts a node at a row inside it; returns the left part. The smaller part is the new node, to update fewer index
  // entries.
  NodeIndex split(NodeIndex node, int64_t row) {
    const NodeIndex fresh = copy_of(node);
    Node<State>&old = (*this)[node], &part = (*this)[fresh];
    if (row - old.low < old.high - row) {
      part.high = old.low = static_cast<int32_t>(row);
      if (part.before != NO_NODE) (*this)[part.before].after = fresh;
      part.after = node;
      old.before = fresh;
      point(fresh, part.low, row);
      point(node, row, row + 1);
      return fresh;
    }
    old.high = part.low = static_cast<int32_t>(row);
    if (part.after != NO_NODE) (*this)[part.after].before = fresh;
    part.before = node;
    old.after = fresh;
    point(fresh, row, part.high);
    return node;
  }

  int64_t rows_ = 0;
  std::vector<Node<State>> nodes_;
  NodeIndex unused_ = NO_NODE;
  int shift_ = 0;
  std::vector<NodeIndex> index_;
};

}  // namespace apportion::verify
