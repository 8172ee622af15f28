// Well-formedness of a program of all ranks before it is walked: numbers in range, one arena per tensor, valid
// operands, zeros in fields that an op does not have, counts that add up to the rows of the lists.
//
//   tables    arenas, operands, instructions, transfers, tasks, grads, rowops       apportion/ir/isa.py
//   ranges    lowest and highest number of each column, table after table
//
// Returns the first number that violates a rule, in this order; apportion/ir/plan/wellformed.py has the messages.
#include "ir/tables.hpp"

#include "ir/programs.hpp"

namespace apportion {

Refused out_of_range(const Table& table, int64_t number, Matrix<const int64_t> ranges, int64_t first) {
  for (int64_t column = 0; column < table.columns.rows(); ++column) {
    const int64_t low = ranges[first + column][0], high = ranges[first + column][1];
    const int64_t row = table.columns[column].visit([&](auto values) {
      int64_t lowest = low, highest = high;  // without a branch, so that the compiler vectorizes the loop
      for (const int64_t value : values) {
        lowest = std::min(lowest, value);
        highest = std::max(highest, value);
      }
      const auto wrong = [&](int64_t value) { return value < low || value > high; };
      return lowest == low && highest == high ? values.size() : std::find_if(values.begin(), values.end(), wrong) - values.begin();
    });
    if (row < table.columns.columns()) return Refusal{"range", number, row, column};
  }
  return {};
}

namespace {

Refused second_arena(const Table& arenas) {
  const Ints tensor = arenas.columns[0];
  for (int64_t rank = 0; rank + 1 < arenas.ptr.size(); ++rank) {
    unsigned seen = 0;
    for (int64_t row = arenas.ptr[rank]; row < arenas.ptr[rank + 1]; ++row) {
      const unsigned bit = 1U << tensor[row];
      if ((seen & bit) != 0) return Refusal{"second arena", ARENAS, row};
      seen |= bit;
    }
  }
  return {};
}

// Checks that operand 0 is none, the others name rows of a tensor, and head sets of KV tensors have only KV heads.
Refused bad_operand(const Table& operands, Column<const bool> foreign) {
  return operands.columns.visit([&](auto columns) -> Refused {
    Refused empty, heads;
    for (int64_t rank = 0; rank + 1 < operands.ptr.size(); ++rank) {
      const int64_t first = operands.ptr[rank];
      for (int64_t row = first; row < operands.ptr[rank + 1]; ++row) {
        const bool is_blank = columns[0][row] == 0 || columns[3][row] == 0;
        if (row == first) {
          for (int64_t column = 0; column < columns.rows(); ++column)
            if (columns[column][row] != 0) return Refusal{"operand zero", OPERANDS, row};
        } else if (is_blank && !empty) {
          empty = Refusal{"empty operand", OPERANDS, row};
        }
        if (!heads && KV_SIDE.has(static_cast<Tensor>(columns[0][row])) && foreign[columns[5][row]])
          heads = Refusal{"foreign heads", OPERANDS, row};
      }
    }
    return empty ? empty : heads;
  });
}

Refused unknown_operand(const Table& list, int64_t number, Column<const int64_t> operands) {
  const auto range = OPERAND_COLUMNS[number - LISTS];
  for (int64_t column = range.first; column < range.end; ++column) {
    const int64_t row = list.columns[column].visit([&](auto values) {
      for (int64_t rank = 0; rank + 1 < list.ptr.size(); ++rank) {
        const int64_t count = operands[rank + 1] - operands[rank];
        for (int64_t at = list.ptr[rank]; at < list.ptr[rank + 1]; ++at)
          if (values[at] >= count) return at;
      }
      return int64_t{-1};
    });
    if (row >= 0) return Refusal{"unknown operand", number, row, column};
  }
  return {};
}

struct Instruction {
  Op op;
  int64_t round, channel, mode, count;
};

// The first instruction for which `is_wrong` is true.
template <class Wrong>
Refused instruction(const Table& table, const char* flaw, Wrong&& is_wrong) {
  return table.columns.visit([&](auto c) -> Refused {
    for (int64_t row = 0; row < c.columns(); ++row) {
      const Instruction item{static_cast<Op>(c[0][row]), c[1][row], c[2][row], c[3][row], c[4][row]};
      if (is_wrong(item)) return Refusal{flaw, INSTRUCTIONS, row};
    }
    return {};
  });
}

Refused stray_field(const Table& table) {
  Refused reason = instruction(table, "stray field", [](const Instruction& item) {
    const bool has_stray_field = item.channel != 0 || item.mode != 0 || (item.op != Op::WAIT && item.round != 0);
    return item.op != Op::LAUNCH && has_stray_field;
  });
  if (reason) return reason;
  return instruction(table, "wait with rows", [](const Instruction& item) { return item.op == Op::WAIT && item.count != 0; });
}

// Checks that, for each rank and list, the counts of the instructions add up to the rows.
Refused miscounted(const std::vector<Table>& tables) {
  const Table& table = tables[INSTRUCTIONS];
  int64_t longest = 0;
  for (std::size_t list = LISTS; list < TABLES; ++list) longest = std::max(longest, tables[list].size());
  if (Refused reason = instruction(table, "count", [&](const Instruction& item) { return item.count > longest; }))
    return reason;
  const Array2<int64_t> sum(table.ranks(), TABLES - LISTS + 1);
  const Ints op = table.columns[0], count = table.columns[4];
  for (int64_t rank = 0; rank < table.ranks(); ++rank)
    for (int64_t row = table.ptr[rank]; row < table.ptr[rank + 1]; ++row)
      sum[rank][list_of(static_cast<Op>(op[row]))] += count[row];
  for (int64_t list = LISTS; list < TABLES; ++list) {
    const Column<const int64_t> ptr = tables[static_cast<std::size_t>(list)].ptr;
    for (int64_t rank = 0; rank < table.ranks(); ++rank)
      if (const int64_t consumed = sum[rank][list - LISTS]; consumed != ptr[rank + 1] - ptr[rank])
        return Refusal{"sum", list, rank, 0, consumed};
  }
  return {};
}

}  // namespace

Refused refusal(const std::vector<Table>& tables, Matrix<const int64_t> ranges, Column<const bool> foreign) {
  int64_t column = 0;
  for (int64_t number = 0; number < TABLES; ++number) {
    const Table& table = tables[static_cast<std::size_t>(number)];
    if (Refused reason = out_of_range(table, number, ranges, column)) return reason;
    column += table.columns.rows();
  }
  if (Refused reason = second_arena(tables[ARENAS])) return reason;
  if (Refused reason = bad_operand(tables[OPERANDS], foreign)) return reason;
  for (int64_t number = LISTS; number < TABLES; ++number)
    if (Refused reason = unknown_operand(tables[static_cast<std::size_t>(number)], number, tables[OPERANDS].ptr))
      return reason;
  if (Refused reason = stray_field(tables[INSTRUCTIONS])) return reason;
  return miscounted(tables);
}

}  // namespace apportion
