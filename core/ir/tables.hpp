// Tables of integers as bytes and back: apportion/schemas/FORMAT.md, section 4; and their checks.
//
//   rows u32 · column 0: width u8, rows differences · column 1 … · column n
//
// A difference is a number minus the previous one, or minus 0 for the first, in two's complement and little endian. The
// differences of a column are equally wide: 0, 1, 2, 4 or 8 bytes. A table without rows ends after the count.
#pragma once

#include "array.hpp"

namespace apportion {

inline constexpr int64_t MAX_ROWS = int64_t{1} << 24;  // of a rank in one table
inline constexpr int64_t NARROW = int64_t{1} << 30;    // bound of numbers that are kept as int32
inline constexpr int64_t FAR = int64_t{1} << 62;       // bound of all numbers

// The size of a rank's part of these tables; appends the widths of its columns. Numbers are within [-2**48, 2**48].
int64_t measure_part(const std::vector<Table>& tables, int64_t rank, std::vector<uint8_t>& widths);

// Writes a rank's part; returns the first of the widths of the next rank.
const uint8_t* encode_part(const std::vector<Table>& tables, int64_t rank, const uint8_t* widths, uint8_t* out);

// A malformed part. column: -1 for the table as a whole.
struct Malformed : std::invalid_argument {
  int64_t rank, table, column;
  Malformed(int64_t of_rank, int64_t of_table, int64_t of_column, const char* what)
      : std::invalid_argument(what), rank(of_rank), table(of_table), column(of_column) {}
};

// A scanned table of one rank: rows, and the bytes of its columns.
struct ScannedTable {
  int64_t rows;
  const uint8_t* data;
  int64_t bytes;
};

// Scans the tables of a part, which must contain nothing else. columns: number of columns of each table. Throws Malformed.
std::vector<ScannedTable> scan_part(Reader part, const std::vector<int64_t>& columns, int64_t rank);

// Fills rows [first, first + scanned.rows) of a table with numbers in [-bound, bound). Returns true if all are in
// bounds; throws Malformed for other errors.
template <class Number>
bool read_rows(const ScannedTable& scanned, int64_t rank, int64_t table, int64_t bound, int64_t first,
               Matrix<Number> values);

// flaw: the broken rule. row: index in the table, over all ranks; for "sum", a rank, whose instructions consume `consumed`
// rows. column: for "range" and "unknown operand".
struct Refusal {
  const char* flaw;
  int64_t table, row, column = 0, consumed = 0;

  auto fields() const { return std::tuple(flaw, table, row, column, consumed); }
};

using Refused = std::optional<Refusal>;

inline constexpr int64_t ARENAS = 0, OPERANDS = 1, INSTRUCTIONS = 2, LISTS = 3, TABLES = 7;

// number: the table's number; first: the index of its first column in `ranges`.
Refused out_of_range(const Table& table, int64_t number, Matrix<const int64_t> ranges, int64_t first);

// foreign: for all heads and each head set, true if it exceeds the KV heads.
Refused refusal(const std::vector<Table>& tables, Matrix<const int64_t> ranges, Column<const bool> foreign);

}  // namespace apportion
