#include "ir/wellformed.hpp"

#include <algorithm>

#include "ir/programs.hpp"

namespace apportion {

using std::int64_t;

Refused out_of_range(const RankedRows& table, int64_t number, Matrix<const int64_t> ranges, int64_t first) {
  for (int64_t column = 0; column < table.values.rows(); ++column) {
    const int64_t low = ranges[first + column][0], high = ranges[first + column][1];
    const int64_t row = table.values[column].visit([&](auto own) {
      int64_t least = low, most = high;  // without a branch, so that the compiler takes several at a time
      for (const int64_t value : own) {
        least = std::min(least, value);
        most = std::max(most, value);
      }
      const auto wrong = [&](int64_t value) { return value < low || value > high; };
      return least == low && most == high ? own.size() : std::find_if(own.begin(), own.end(), wrong) - own.begin();
    });
    if (row < table.values.columns()) return Refusal{Flaw::RANGE, number, row, column};
  }
  return {};
}

namespace {

Refused second_arena(const RankedRows& arenas) {
  const Ints tensor = arenas.values[0];
  for (int64_t rank = 0; rank + 1 < arenas.ptr.size(); ++rank) {
    unsigned seen = 0;
    for (int64_t row = arenas.ptr[rank]; row < arenas.ptr[rank + 1]; ++row) {
      const unsigned own = 1U << tensor[row];
      if ((seen & own) != 0) return Refusal{Flaw::SECOND_ARENA, ARENAS, row};
      seen |= own;
    }
  }
  return {};
}

// Operand 0 is none, the others name rows of a tensor; head sets of KV tensors hold KV heads.
Refused bad_operand(const RankedRows& operands, Column<const bool> foreign) {
  return operands.values.visit([&](auto columns) -> Refused {
    Refused again, heads;
    for (int64_t rank = 0; rank + 1 < operands.ptr.size(); ++rank) {
      const int64_t first = operands.ptr[rank];
      for (int64_t row = first; row < operands.ptr[rank + 1]; ++row) {
        const bool blank = columns[0][row] == 0 || columns[3][row] == 0;
        if (row == first) {
          for (int64_t column = 0; column < columns.rows(); ++column)
            if (columns[column][row] != 0) return Refusal{Flaw::OPERAND_ZERO, OPERANDS, row};
        } else if (blank && !again) {
          again = Refusal{Flaw::EMPTY_OPERAND, OPERANDS, row};
        }
        if (!heads && KV_SIDE.has(static_cast<Tensor>(columns[0][row])) && foreign[columns[5][row]])
          heads = Refusal{Flaw::FOREIGN_HEADS, OPERANDS, row};
      }
    }
    return again ? again : heads;
  });
}

Refused unknown_operand(const RankedRows& list, int64_t number, Column<const int64_t> operands) {
  const auto naming = OPERAND_COLUMNS[number - LISTS];
  for (int64_t column = naming.first; column < naming.end; ++column) {
    const int64_t row = list.values[column].visit([&](auto own) {
      for (int64_t rank = 0; rank + 1 < list.ptr.size(); ++rank) {
        const int64_t count = operands[rank + 1] - operands[rank];
        for (int64_t at = list.ptr[rank]; at < list.ptr[rank + 1]; ++at)
          if (own[at] >= count) return at;
      }
      return int64_t{-1};
    });
    if (row >= 0) return Refusal{Flaw::UNKNOWN_OPERAND, number, row, column};
  }
  return {};
}

struct Instruction {
  Op op;
  int64_t round, channel, mode, count;
};

// The first instruction of which `wrong` holds.
template <class Wrong>
Refused instruction(const RankedRows& table, Flaw flaw, Wrong&& wrong) {
  return table.values.visit([&](auto own) -> Refused {
    for (int64_t row = 0; row < own.columns(); ++row) {
      const Instruction found{static_cast<Op>(own[0][row]), own[1][row], own[2][row], own[3][row], own[4][row]};
      if (wrong(found)) return Refusal{flaw, INSTRUCTIONS, row};
    }
    return {};
  });
}

Refused stray_field(const RankedRows& table) {
  Refused found = instruction(table, Flaw::STRAY_FIELD, [](const Instruction& one) {
    const bool stray = one.channel != 0 || one.mode != 0 || (one.op != Op::WAIT && one.round != 0);
    return one.op != Op::LAUNCH && stray;
  });
  if (found) return found;
  return instruction(table, Flaw::WAIT_WITH_ROWS, [](const Instruction& one) { return one.op == Op::WAIT && one.count != 0; });
}

// Checks that, for each rank and list, the counts of the instructions add up to the rows.
Refused miscounted(const ProgramTables& program) {
  const RankedRows& table = program.tables[INSTRUCTIONS];
  int64_t longest = 0;
  for (int64_t list = LISTS; list < TABLES; ++list)
    longest = std::max(longest, program.tables[static_cast<std::size_t>(list)].values.columns());
  if (Refused found = instruction(table, Flaw::COUNT, [&](const Instruction& one) { return one.count > longest; }))
    return found;
  std::vector<int64_t> sums(static_cast<std::size_t>(program.ranks() * (TABLES - LISTS + 1)));
  const Column<int64_t> sum(sums.data(), static_cast<int64_t>(sums.size()));
  const Ints op = table.values[0], count = table.values[4];
  for (int64_t rank = 0; rank < program.ranks(); ++rank)
    for (int64_t row = table.ptr[rank]; row < table.ptr[rank + 1]; ++row)
      sum[rank * (TABLES - LISTS + 1) + list_of(static_cast<Op>(op[row]))] += count[row];
  for (int64_t list = LISTS; list < TABLES; ++list) {
    const RankedRows& own = program.tables[static_cast<std::size_t>(list)];
    for (int64_t rank = 0; rank < program.ranks(); ++rank) {
      const int64_t consumed = sum[rank * (TABLES - LISTS + 1) + list - LISTS];
      if (consumed != own.ptr[rank + 1] - own.ptr[rank]) return Refusal{Flaw::SUM, list, rank, 0, consumed};
    }
  }
  return {};
}

}  // namespace

Refused refusal(const ProgramTables& program) {
  const auto table = [&](int64_t number) -> const RankedRows& {
    return program.tables[static_cast<std::size_t>(number)];
  };
  int64_t column = 0;
  for (int64_t number = 0; number < TABLES; ++number) {
    if (Refused found = out_of_range(table(number), number, program.ranges, column)) return found;
    column += table(number).values.rows();
  }
  if (Refused found = second_arena(table(ARENAS))) return found;
  if (Refused found = bad_operand(table(OPERANDS), program.foreign)) return found;
  for (int64_t number = LISTS; number < TABLES; ++number)
    if (Refused found = unknown_operand(table(number), number, table(OPERANDS).ptr)) return found;
  if (Refused found = stray_field(table(INSTRUCTIONS))) return found;
  return miscounted(program);
}

}  // namespace apportion
