// Edge colouring of a bipartite multigraph: a vertex has at most one edge of each colour.
#pragma once

#include "owned.hpp"

namespace apportion {

// The colours of the edges src -> dst, both in [0, ranks), of which there are `count`, at least the largest degree.
Array<int32_t> colour_edges(Ints src, Ints dst, int64_t ranks, int64_t count);

}  // namespace apportion
