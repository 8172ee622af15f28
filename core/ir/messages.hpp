// Messages of rounds: apportion/ir/plan/messages.py.
#pragma once

#include <vector>

#include "ir/programs.hpp"

namespace apportion {

// Row sizes of operands: `RowSizes` of messages.py.
struct RowSizes {
  static constexpr std::size_t FIELDS = 5;
  HeadCounts heads;
  Column<const bool> ordered;               // [1 + head sets]: true if the heads are 0, 1, ..., the order of home rows
  Column<const std::int64_t> number_bytes;  // [tensors]: bytes of a row of one head
  Column<const bool> one_array;             // [tensors * 2], by tensor, then space: true for one array
  std::int64_t alignment;
};

// For `find_messages` of messages.py: each transfer's message; each message's first transfer; whether it is staged.
struct MessageGroups {
  Array<std::int32_t> message;
  Growing<std::int32_t> first;
  Growing<std::uint8_t> staged;

  auto fields() { return moved(message, first, staged); }
};

MessageGroups group(const Programs& programs, const RowSizes& sizes);

}  // namespace apportion
