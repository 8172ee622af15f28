// State of DistCA's migration: rules, servers, shares and candidates.
#pragma once

#include "planner/distca_pairs.hpp"
#include "planner/numbers.hpp"

namespace apportion::distca {

// `Limits` of distca/parts.py. Bytes are of a row; caps in bytes. excess, grain: of the pass at hand.
struct Rules {
  static constexpr std::size_t FIELDS = 14;
  double tolerance;  // share of its target by which a server may fall short
  bool two_sided;
  int64_t grain;  // cuts are multiples of this number of rows
  double spare;   // share of a target by which a part may exceed the requested work
  double threshold;
  int64_t q_bytes, o_bytes, kv_bytes, priced_q;
  bool kv_free, capped;
  int64_t send_cap, receive_cap, buffer_cap;
  double excess = 0;  // share of its target beyond which a server gives
};

struct Server {
  int64_t load = 0;  // pairs
  double target = 0;
  int64_t sent = 0, received = 0, held = 0;  // bytes
  std::vector<int64_t> shares;               // initially oldest last, later newest last; includes moved ones

  double surplus() const { return real(load) - target; }
};

struct Share {
  int64_t pair;
  Range rows;
  int64_t at, work;
};

// A share of a surplus server. most_e: its E as a whole on a server without any of its rows. A server that has
// nothing of its pair pays for its last rows at least once + a_pair * their work in bytes; 0 where that is not known.
struct Candidate {
  int64_t share;
  double most_e, work = 0, once = 0, a_pair = 0;

  bool surely_below(double floor, double given) const { return given < floor * (once + a_pair * given); }
};

}  // namespace apportion::distca
