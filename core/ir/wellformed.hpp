// Well-formedness of a program of all ranks before it is walked: numbers in range, one arena per tensor, valid
// operands, zeros in fields that an op does not have, counts that add up to the rows of the lists.
//
//   tables    arenas, operands, instructions, transfers, tasks, grads, rowops       apportion/ir/isa.py
//   ranges    lowest and highest number of each column, table after table
//
// Returns the first number that violates a rule, in this order; apportion/ir/plan/wellformed.py has the messages.
#pragma once

#include <optional>
#include <tuple>

#include "ir/tables.hpp"

namespace apportion {

// flaw: the broken rule. row: index in the table, over all ranks; for "sum", a rank, whose instructions consume `consumed`
// rows. column: for "range" and "unknown operand".
struct Refusal {
  const char* flaw;
  std::int64_t table, row, column = 0, consumed = 0;

  auto fields() const { return std::tuple(flaw, table, row, column, consumed); }
};

using Refused = std::optional<Refusal>;

inline constexpr std::int64_t ARENAS = 0, OPERANDS = 1, INSTRUCTIONS = 2, LISTS = 3, TABLES = 7;

// number: the table's number; first: the index of its first column in `ranges`.
Refused out_of_range(const Table& table, std::int64_t number, Matrix<const std::int64_t> ranges,
                     std::int64_t first);

// foreign: for all heads and each head set, true if it exceeds the KV heads.
Refused refusal(const std::vector<Table>& tables, Matrix<const std::int64_t> ranges, Column<const bool> foreign);

}  // namespace apportion
