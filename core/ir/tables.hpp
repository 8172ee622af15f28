// Tables of integers as bytes and back: apportion/schemas/FORMAT.md, section 4.
//
//   rows u32 · column 0: width u8, rows differences · column 1 … · column n
//
// A difference is a number minus the previous one, or minus 0 for the first, in two's complement and little endian. The
// differences of a column are equally wide: 0, 1, 2, 4 or 8 bytes. A table without rows ends after the count.
#pragma once

#include <string>
#include <vector>

#include "array.hpp"

namespace apportion {

inline constexpr std::int64_t MAX_ROWS = std::int64_t{1} << 24;  // of a rank in one table
inline constexpr std::int64_t NARROW = std::int64_t{1} << 30;    // bound of numbers that are kept as int32
inline constexpr std::int64_t FAR = std::int64_t{1} << 62;       // bound of all numbers

// The size of a rank's part of these tables; appends the widths of its columns. Numbers are within [-2**48, 2**48].
std::int64_t measure_part(const std::vector<Table>& tables, std::int64_t rank, std::vector<std::uint8_t>& widths);

// Writes a rank's part; returns the first of the widths of the next rank.
const std::uint8_t* encode_part(const std::vector<Table>& tables, std::int64_t rank, const std::uint8_t* widths,
                                std::uint8_t* out);

// A malformed part. column: -1 for the table as a whole.
struct Malformed : std::invalid_argument {
  std::int64_t rank, table, column;
  Malformed(std::int64_t of_rank, std::int64_t of_table, std::int64_t of_column, const char* what)
      : std::invalid_argument(what), rank(of_rank), table(of_table), column(of_column) {}
};

// A scanned table of one rank: rows, and the bytes of its columns.
struct ScannedTable {
  std::int64_t rows;
  const std::uint8_t* data;
  std::int64_t bytes;
};

// Scans the tables of a part, which must contain nothing else. columns: number of columns of each table. Throws Malformed.
std::vector<ScannedTable> scan_part(Reader part, const std::vector<std::int64_t>& columns, std::int64_t rank);

// Fills rows [first, first + scanned.rows) of a table with numbers in [-bound, bound). Returns true if all are in
// bounds; throws Malformed for other errors.
template <class Number>
bool read_rows(const ScannedTable& scanned, std::int64_t rank, std::int64_t table, std::int64_t bound, std::int64_t first,
               Matrix<Number> values);

}  // namespace apportion
