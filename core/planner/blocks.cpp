// Cuts the token axis into blocks, counts their pairs, and joins blocks into pieces.

#include "bind.hpp"
#include "ir/areas.hpp"
#include "planner/numbers.hpp"

namespace apportion {

namespace {

// The starts of blocks of `block` tokens, and the end; for each block its long sequence, or -1. Neighbouring short
// sequences of one group share a block.
std::pair<Growing<int64_t>, Growing<int64_t>> cut_axis(Column<const int64_t> sequences, Column<const int64_t> group, int64_t block) {
  Growing<int64_t> starts, owners;
  const auto add = [&](int64_t start, int64_t owner) {
    starts.push_back(start);
    owners.push_back(owner);
  };
  bool open = false;  // a block of short sequences
  for (int64_t s = 0; s < group.size(); ++s) {
    const int64_t begin = sequences[s], end = sequences[s + 1];
    if (end - begin < block) {
      if (!open || group[s] != group[s - 1] || end - starts.back() > block) add(begin, -1);
      open = true;
      continue;
    }
    open = false;
    for (int64_t at = begin; at < end; at += block) add(at, s);
  }
  starts.push_back(sequences[group.size()]);
  return {std::move(starts), std::move(owners)};
}

// The number of pairs of the bands with a query in each block.
Array<int64_t> row_areas(Matrix<const int64_t> bands, Column<const int64_t> starts) {
  Array<int64_t> areas(starts.size() - 1);
  for (int64_t band = 0; band < bands.rows(); ++band) {
    const Column<const int64_t> limits = bands[band];
    const int64_t q0 = limits[0], q1 = limits[1];
    int64_t block = std::upper_bound(starts.begin(), starts.end(), q0) - starts.begin() - 1;
    for (; block < areas.size() && starts[block] < q1; ++block)
      areas[block] +=
          area_of(std::max(q0, starts[block]), std::min(q1, starts[block + 1]), limits[2], limits[3], limits[4], limits[5]);
  }
  return areas;
}

// Numbers the pieces: blocks i and m-1-i of a sequence with increasing weight share one; other blocks have their own.
Array<int64_t> tie(Column<const int64_t> owner, Column<const int64_t> weight, Column<const int64_t> lengths) {
  Array<int64_t> piece(owner.size());
  int64_t pieces = 0;
  for (int64_t first = 0, end = 0; first < owner.size(); first = end) {
    for (end = first + 1; end < owner.size() && owner[first] >= 0 && owner[end] == owner[first];) ++end;
    const int64_t blocks = end - first, last = end - 1;
    const bool rising =
        blocks > 1 && real(weight[last]) / real(lengths[last]) >= 2 * (real(weight[first]) / real(lengths[first]));
    for (int64_t block = 0; block < blocks; ++block)
      piece[first + block] = pieces + (rising ? std::min(block, blocks - 1 - block) : block);
    pieces += rising ? (blocks + 1) / 2 : blocks;
  }
  return piece;
}

}  // namespace

static const Area area("blocks", [](nb::module_& m) {
  def(m, "cut_axis(sequences, group, block)", cut_axis);
  def(m, "row_areas(bands, starts)", row_areas);
  def(m, "tie(owner, weight, lengths)", tie);
});

}  // namespace apportion
