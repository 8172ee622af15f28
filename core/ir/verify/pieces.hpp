// Pieces of attention: bands of addresses or tokens, each with a task and a head set.
#pragma once

#include <cstdint>
#include <vector>

#include "array.hpp"

namespace apportion::verify {

using std::int64_t;

// Queries [q0, q1), keys [k0, k1), dmin <= q - k <= dmax.
struct Band {
  std::int32_t q0, q1, k0, k1, dmin, dmax;

  bool operator==(const Band&) const = default;
};

// Marks: in a list, the next piece and the list; in a trace, the task and the head set of its queries.
struct Piece {
  Band band;
  std::int32_t first_mark, second_mark;
};

}  // namespace apportion::verify
