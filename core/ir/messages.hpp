// Messages of rounds: apportion/ir/plan/messages.py.
#pragma once

#include <vector>

#include "ir/programs.hpp"

namespace apportion {

// Row sizes of operands: `RowSizes` of messages.py.
struct RowSizes {
  HeadCounts heads;
  Column<const bool> ordered;               // of none and head sets: whether its heads are 0, 1, ..., as home rows have them
  Column<const std::int64_t> number_bytes;  // of a row of one head of a tensor
  Column<const bool> one_array;             // [tensors * 2], of a tensor in a space
  std::int64_t alignment;
};

RowSizes row_sizes(Fields& arrays, std::int64_t alignment);

// `MessageGroups` of messages.py.
struct MessageGroups {
  std::vector<std::int32_t> of, first;
  std::vector<std::uint8_t> staged;
};

MessageGroups group(const Programs& programs, const RowSizes& sizes);

}  // namespace apportion
