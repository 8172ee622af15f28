// Cuts the token axis into blocks, counts their pairs, and joins blocks into pieces.
#include <algorithm>
#include <vector>

#include "bind.hpp"
#include "ir/areas.hpp"
#include "planner/numbers.hpp"

namespace apportion {

using std::int64_t;

namespace {

struct Cuts {
  std::vector<int64_t> starts;  // and the end
  std::vector<int64_t> owner;   // for each block its long sequence, or -1
};

// Blocks of `block` tokens; shorter neighbours of one group share one.
Cuts cut_axis(Column<const int64_t> sequences, Column<const int64_t> group, int64_t block) {
  Cuts made;
  const auto add = [&made](int64_t start, int64_t owner) {
    made.starts.push_back(start);
    made.owner.push_back(owner);
  };
  bool open = false;  // a block of short sequences
  for (int64_t s = 0; s < group.size(); ++s) {
    const int64_t begin = sequences[s], end = sequences[s + 1];
    if (end - begin < block) {
      if (!open || group[s] != group[s - 1] || end - made.starts.back() > block) add(begin, -1);
      open = true;
      continue;
    }
    open = false;
    for (int64_t at = begin; at < end; at += block) add(at, s);
  }
  made.starts.push_back(sequences[group.size()]);
  return made;
}

// Pairs of bands whose query lies in each block.
void add_areas(Matrix<const int64_t> bands, Column<const int64_t> starts, Column<int64_t> found) {
  for (int64_t band = 0; band < bands.rows(); ++band) {
    const Column<const int64_t> one = bands[band];
    const int64_t q0 = one[0], q1 = one[1];
    int64_t block = std::upper_bound(starts.begin(), starts.end(), q0) - starts.begin() - 1;
    for (; block < found.size() && starts[block] < q1; ++block)
      found[block] +=
          area_of(std::max(q0, starts[block]), std::min(q1, starts[block + 1]), one[2], one[3], one[4], one[5]);
  }
}

// Blocks i and m-1-i of a sequence with rising weight share a piece; any other block is its own.
void tie(Column<const int64_t> owner, Column<const int64_t> weight, Column<const int64_t> lengths,
         Column<int64_t> piece) {
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
}

}  // namespace

void bind_blocks(nb::module_& m) {
  m.def("cut_axis", [](In<int64_t, "sequences"> sequences, In<int64_t, "group"> group, int64_t block) {
    Cuts made = unlocked([&] { return cut_axis(sequences, group, block); });
    return nb::make_tuple(handed(std::move(made.starts)), handed(std::move(made.owner)));
  });

  m.def("row_areas", [](In2<int64_t, "bands"> bands, In<int64_t, "starts"> starts) {
    New<int64_t> found(starts.size() - 1);
    unlocked([&] {
      std::fill(found.begin(), found.end(), 0);
      add_areas(bands, starts, found);
    });
    return found.array();
  });

  m.def("tie", [](In<int64_t, "owner"> owner, In<int64_t, "weight"> weight, In<int64_t, "lengths"> lengths) {
    New<int64_t> piece(owner.size());
    unlocked([&] { tie(owner, weight, lengths, piece); });
    return piece.array();
  });
}

}  // namespace apportion
