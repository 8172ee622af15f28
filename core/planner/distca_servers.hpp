// The state of DistCA's migration: rules, servers, shares and candidates.
#pragma once

#include "planner/distca_pairs.hpp"
#include "planner/numbers.hpp"

namespace apportion::distca {

// `Limits` of distca/parts.py. Sizes are bytes of a row; caps are bytes. excess, grain: of the current pass.
struct Rules {
  static constexpr std::size_t FIELDS = 14;
  double tolerance;  // fraction of its target by which a server may fall short
  bool two_sided;
  int64_t grain;  // cuts are multiples of this number of rows
  double spare;   // fraction of a target by which a part may exceed the requested work
  double threshold;
  int64_t q_bytes, o_bytes, kv_bytes, priced_q;
  bool kv_free, capped;
  int64_t send_cap, receive_cap, buffer_cap;
  double excess = 0;  // fraction of its target by which a server must exceed it to give work
};

struct Server {
  int64_t load = 0;  // pairs
  double target = 0;
  int64_t sent = 0, received = 0, held = 0;  // bytes
  std::vector<int64_t> shares;               // its own, last first, then received ones; includes shares that left

  double surplus() const { return real(load) - target; }
};

struct Share {
  int64_t pair;
  Range rows;
  int64_t server, work;
};

// A share of a surplus server. max_e: its E if moved as a whole to a server without any of its rows. once, per_pair: for
// a server without rows of the pair, the share's last rows cost at least `once + per_pair * work` bytes; 0: unknown.
struct Candidate {
  int64_t share;
  double max_e, work = 0, once = 0, per_pair = 0;

  bool surely_below(double floor, double amount) const { return amount < floor * (once + per_pair * amount); }
};

}  // namespace apportion::distca
