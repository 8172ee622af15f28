// Head sets of a plan as bits. With many heads, heads that only occur together share a bit, and several words may be
// needed.
#pragma once

#include "array.hpp"
#include "ir/isa.hpp"

namespace apportion::verify {

using std::int64_t;
using Bits = std::uint64_t;

// Rows: the query and the KV side. bits: a row of each side for every word; number: the number of each set, equal for
// equal sets; size: its number of heads. serves: [sets, sets], true if the second has all KV heads that the first's
// query heads need.
struct HeadSets {
  static constexpr std::size_t FIELDS = 4;
  Matrix<const int64_t> bits, number, size;
  Matrix<const bool> serves;

  static int64_t side(Tensor tensor) { return KV_SIDE.has(tensor); }
  int64_t words() const { return bits.rows() / 2; }
  // The heads of a set in a word; for headless tensors, one bit in the first word.
  Bits bits_of(Tensor tensor, int64_t word, int64_t set) const {
    if (HEADLESS.has(tensor)) return word == 0;
    return static_cast<Bits>(bits[2 * word + side(tensor)][set]);
  }
  int64_t number_of(Tensor tensor, int64_t set) const { return number[side(tensor)][set]; }
  int64_t size_of(Tensor tensor, int64_t set) const { return HEADLESS.has(tensor) ? 0 : size[side(tensor)][set]; }
};

}  // namespace apportion::verify
