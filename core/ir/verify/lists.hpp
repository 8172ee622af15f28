// Attention pairs of tasks as lists of bands, one per head set; equal lists are stored once.
//
//   set 0   A B C D ..          list 0   A B C D ..
//   set 1   A B C D ..    ──►   set 0 ── list 0, set 1 ── list 0, set 2 ── list 1
//   set 2   A B X ..            list 1   A B X ..
//
// The members of a group that splits heads attend to the same bands, and backward has the bands of forward. So a set
// *follows* a list, band by band, as long as both agree, and its bands are not stored again: a plan with many tasks
// needs the memory of one group member. A set that deviates gets its own list, from its first band on.
#pragma once

#include "ir/verify/tokens.hpp"

namespace apportion::verify {

class Lists {
 public:
  explicit Lists(int64_t sets) : followers_(static_cast<std::size_t>(sets)) {}

  // Begins a program of `tasks` tasks, in which each set is expected to repeat its list of the previous one.
  void begin(int64_t tasks) {
    if (pieces_.empty()) pieces_.reserve(static_cast<std::size_t>(std::min(tasks, MAX_RESERVED)));
    first_piece_ = pieces().size();
    for (Follower& follower : followers_) follower = {follower.list, NONE, 0, false};
  }

  void add(const Band& band, int64_t set) {
    Follower& follower = followers_[static_cast<std::size_t>(set)];
    if (const Index at = next_of(follower); at != NONE && piece(at).band == band) {
      follower.at = at;
      ++follower.matched;
      return;
    }
    if (!follower.owns && !detach(follower, band)) return;
    append(follower, band);
  }

  // Ends a program and closes the list of each set.
  void end() {
    for (Follower& follower : followers_) {
      if (follower.matched == 0) follower.list = NONE;
      if (follower.list != NONE && !follower.owns && follower.matched < list(follower.list).length) fork(follower);
    }
  }

  int64_t count() const { return static_cast<int64_t>(lists_.size()); }
  int64_t sets() const { return static_cast<int64_t>(followers_.size()); }
  // The list of a set; -1 if it has none.
  int64_t followed_by(int64_t set) const { return followers_[static_cast<std::size_t>(set)].list; }
  // Number of pieces of earlier programs.
  int64_t first_piece() const { return first_piece_; }
  Column<const Piece> pieces() const { return {pieces_.data(), static_cast<int64_t>(pieces_.size())}; }

 private:
  using Index = int32_t;
  static constexpr Index NONE = -1;
  static constexpr int64_t MAX_RESERVED = 1 << 21;

  struct List {
    Index first = NONE, last = NONE, length = 0;
  };
  // at: the last matched piece of its list; matched: their number; owns: the set extends the list itself.
  struct Follower {
    Index list = NONE, at = NONE, matched = 0;
    bool owns = false;
  };

  Piece& piece(Index at) { return pieces_[static_cast<std::size_t>(at)]; }
  List& list(Index number) { return lists_[static_cast<std::size_t>(number)]; }

  Index next_of(const Follower& follower) {
    if (follower.at != NONE) return piece(follower.at).first_mark;
    return follower.list != NONE ? list(follower.list).first : NONE;
  }

  // Moves a set to another list; returns true if the band must be appended to it. A set that has matched nothing moves
  // to a list that begins with the band, if there is one.
  bool detach(Follower& follower, const Band& band) {
    if (follower.matched > 0) {
      fork(follower);
      return true;
    }
    for (Index number = 0; number < static_cast<Index>(lists_.size()); ++number)
      if (const Index first = list(number).first; piece(first).band == band) {
        follower = {number, first, 1, false};
        return false;
      }
    follower = {new_list(), NONE, 0, true};
    return true;
  }

  // Copies the matched pieces into a list of its own.
  void fork(Follower& follower) {
    Index at = list(follower.list).first;
    Follower copy{new_list(), NONE, 0, true};
    for (; copy.matched < follower.matched; at = piece(at).first_mark) append(copy, Band(piece(at).band));
    follower = copy;
  }

  void append(Follower& follower, const Band& band) {
    const auto at = static_cast<Index>(pieces_.size());
    pieces_.push_back({band, NONE, follower.list});
    List& target = list(follower.list);
    if (target.length++ == 0)
      target.first = at;
    else
      piece(target.last).first_mark = at;
    target.last = at;
    follower.at = at;
    ++follower.matched;
  }

  Index new_list() {
    lists_.emplace_back();
    return static_cast<Index>(lists_.size() - 1);
  }

  std::vector<Follower> followers_;
  std::vector<List> lists_;
  std::vector<Piece> pieces_;
  int64_t first_piece_ = 0;
};

}  // namespace apportion::verify
