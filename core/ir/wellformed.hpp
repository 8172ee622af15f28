// Well-formedness of a program of all ranks before it is walked: numbers in range, one arena per tensor, valid
// operands, no fields that an op does not have, counts that add up to the rows of the lists.
//
//   tables    arenas, operands, instructions, transfers, tasks, grads, rowops       apportion/ir/isa.py
//   ranges    lowest and highest number of each column, table after table
//
// Returns the first number that violates a rule, in this order; apportion/ir/plan/wellformed.py has the messages.
#pragma once

#include <optional>

#include "ir/tables.hpp"

namespace apportion {

enum class Flaw : std::uint8_t {
  RANGE,
  SECOND_ARENA,
  OPERAND_ZERO,
  EMPTY_OPERAND,
  FOREIGN_HEADS,
  UNKNOWN_OPERAND,
  STRAY_FIELD,
  WAIT_WITH_ROWS,
  COUNT,
  SUM
};

// row: of the table, over all ranks; for SUM a rank, and `consumed` rows of its list. column: for RANGE and
// UNKNOWN_OPERAND.
struct Refusal {
  Flaw flaw;
  std::int64_t table, row, column = 0, consumed = 0;
};

using Refused = std::optional<Refusal>;

inline constexpr std::int64_t ARENAS = 0, OPERANDS = 1, INSTRUCTIONS = 2, LISTS = 3, TABLES = 7;

struct ProgramTables {
  std::vector<RankedRows> tables;
  Matrix<const std::int64_t> ranges;
  Column<const bool> foreign;  // for each head set, from 1 on: true if it exceeds the KV heads

  std::int64_t ranks() const { return tables[0].ptr.size() - 1; }
};

// number: of the table; first: the range of its first column.
Refused out_of_range(const RankedRows& table, std::int64_t number, Matrix<const std::int64_t> ranges,
                     std::int64_t first);

Refused refusal(const ProgramTables& program);

}  // namespace apportion
