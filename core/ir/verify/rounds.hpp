// Rounds that the current rank has launched or completed, and the rounds that still send the rows of a node.
//
//   rounds   number ─► launched by this rank? waited for? its transfers [first, end)
//   senders  of a node: round 7 ─► round 4 ─► none         the parts of a cut node share one list
//
// Completed rounds stay completed: they are unlinked when encountered.
#pragma once

#include <utility>
#include <vector>

#include "ir/verify/faults.hpp"

namespace apportion::verify {

using RoundNumber = std::int32_t;
inline constexpr RoundNumber NO_ROUND = -1;
using Senders = std::int32_t;
inline constexpr Senders NO_SENDERS = -1;

struct Round {
  std::int32_t walk = -1;  // the last walk that launched it; other fields are valid in that walk only
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
  std::int32_t walk_ = 0;
  int64_t in_flight_ = 0;
  RoundNumber last_ = NO_ROUND;
};

}  // namespace apportion::verify
