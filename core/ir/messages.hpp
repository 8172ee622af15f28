// Messages of rounds: apportion/ir/plan/messages.py.
#pragma once

#include "ir/programs.hpp"

namespace apportion {

// Row sizes of operands: `RowSizes` of messages.py.
struct RowSizes {
  HeadCounts heads;
  Column<const bool> ordered;               // [1 + head sets]: true if the heads are 0, 1, ..., the order of home rows
  Column<const int64_t> number_bytes;  // [tensors]: bytes of a row of one head
  Column<const bool> one_array;             // [tensors * 2], by tensor, then space: true for one array
  int64_t alignment;
};

// For `find_messages` of messages.py: each transfer's message; each message's first transfer; whether it is staged.
struct MessageGroups {
  Array<int32_t> message;
  Growing<int32_t> first;
  Growing<uint8_t> staged;

  auto fields() { return moved(message, first, staged); }
};

MessageGroups group(const Programs& programs, const RowSizes& sizes);

}  // namespace apportion
