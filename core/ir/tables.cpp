#include "ir/tables.hpp"

namespace apportion {

static_assert(std::endian::native == std::endian::little);

// Zigzag code of a difference, sign last, so that the OR of all codes gives the width of the widest.
static uint64_t zigzag(int64_t step) { return static_cast<uint64_t>(step) << 1 ^ static_cast<uint64_t>(step >> 63); }

static int width_of(uint64_t bits) {
  const int needed = static_cast<int>(std::bit_width(bits));
  return needed == 0 ? 0 : needed <= 8 ? 1 : needed <= 16 ? 2 : needed <= 32 ? 4 : 8;
}

template <class Number>
static uint64_t bits_of(Column<const Number> values) {
  uint64_t bits = 0;
  int64_t last = 0;
  for (const Number number : values) {
    bits |= zigzag(number - last);
    last = number;
  }
  return bits;
}

template <class Width, class Number>
static void put_differences(Column<const Number> values, uint8_t* out) {
  int64_t last = 0;
  for (int64_t row = 0; row < values.size(); ++row) {
    const Width step = static_cast<Width>(values[row] - last);
    last = values[row];
    std::memcpy(out + row * static_cast<int64_t>(sizeof(Width)), &step, sizeof(Width));
  }
}

template <class Number>
static uint8_t* put_column(Column<const Number> values, int width, uint8_t* out) {
  *out++ = static_cast<uint8_t>(width);
  if (width == 1) put_differences<uint8_t>(values, out);
  if (width == 2) put_differences<uint16_t>(values, out);
  if (width == 4) put_differences<uint32_t>(values, out);
  if (width == 8) put_differences<uint64_t>(values, out);
  return out + width * values.size();
}

int64_t measure_part(const std::vector<Table>& tables, int64_t rank, std::vector<uint8_t>& widths) {
  int64_t size = 0;
  for (const Table& table : tables) {
    const int64_t first = table.ptr[rank], end = table.ptr[rank + 1];
    size += 4;
    for (int64_t column = 0; end > first && column < table.columns.rows(); ++column) {
      const int width = width_of(table.columns[column].visit([&](auto values) { return bits_of(values.slice(first, end)); }));
      widths.push_back(static_cast<uint8_t>(width));
      size += 1 + width * (end - first);
    }
  }
  return size;
}

const uint8_t* encode_part(const std::vector<Table>& tables, int64_t rank, const uint8_t* widths, uint8_t* out) {
  for (const Table& table : tables) {
    const int64_t first = table.ptr[rank], end = table.ptr[rank + 1];
    for (int place = 0; place < 4; ++place) *out++ = static_cast<uint8_t>((end - first) >> (8 * place));
    for (int64_t column = 0; end > first && column < table.columns.rows(); ++column) {
      const int width = *widths++;
      out = table.columns[column].visit([&](auto values) { return put_column(values.slice(first, end), width, out); });
    }
  }
  return widths;
}

std::vector<ScannedTable> scan_part(Reader part, const std::vector<int64_t>& columns, int64_t rank) {
  std::vector<ScannedTable> tables;
  tables.reserve(columns.size());
  int64_t table = 0;
  try {
    for (; table < static_cast<int64_t>(columns.size()); ++table) {
      const int64_t rows = part.u32(), before = part.left();
      const uint8_t* data = part.take(0);
      int widest = 0;
      for (int64_t column = 0; rows > 0 && column < columns[static_cast<std::size_t>(table)]; ++column) {
        const int width = part.byte();
        part.take(width * rows);
        if (width > 8 || (0b100010111 >> width & 1) == 0)
          throw Malformed(rank, table, -1, "has a width that is none of 0, 1, 2, 4 and 8");
        widest = std::max(widest, width);
      }
      if (rows > MAX_ROWS || (rows > 1 && widest == 0))
        throw Malformed(rank, table, -1, "has more than 16777216 rows, or rows that take no byte");
      tables.push_back({rows, data, before - part.left()});
    }
  } catch (const Truncated&) {
    throw Malformed(rank, table, -1, "ends before its last row");
  }
  if (part.left() > 0) throw Malformed(rank, table - 1, -1, "is followed by further bytes");
  return tables;
}

// Sums differences; returns the OR of all zigzag codes, for `width_of`. Stops at a number out of bounds,
// with `is_within_bounds` false.
template <class Width, class Number>
static uint64_t sum_steps(const uint8_t* data, int64_t bound, Column<Number> values, bool& is_within_bounds) {
  uint64_t bits = 0;
  int64_t last = 0;
  for (int64_t row = 0; row < values.size(); ++row) {
    Width step;
    std::memcpy(&step, data + row * static_cast<int64_t>(sizeof(Width)), sizeof(Width));
    bits |= zigzag(step);
    // both are below 2**63 in absolute value, but their sum may not be
    if (__builtin_add_overflow(last, static_cast<int64_t>(step), &last) || last < -bound || last >= bound) {
      is_within_bounds = false;
      return bits;
    }
    values[row] = static_cast<Number>(last);
  }
  return bits;
}

template <class Number>
bool read_rows(const ScannedTable& scanned, int64_t rank, int64_t table, int64_t bound, int64_t first, Matrix<Number> values) {
  Reader bytes(scanned.data, scanned.bytes);
  for (int64_t column = 0; scanned.rows > 0 && column < values.rows(); ++column) {
    const Column<Number> target = values[column].slice(first, first + scanned.rows);
    const int width = bytes.byte();
    const uint8_t* data = bytes.take(width * scanned.rows);
    bool is_within_bounds = true;
    uint64_t bits = 0;
    if (width == 0) std::fill(target.begin(), target.end(), Number{0});
    if (width == 1) bits = sum_steps<int8_t>(data, bound, target, is_within_bounds);
    if (width == 2) bits = sum_steps<int16_t>(data, bound, target, is_within_bounds);
    if (width == 4) bits = sum_steps<int32_t>(data, bound, target, is_within_bounds);
    if (width == 8) bits = sum_steps<int64_t>(data, bound, target, is_within_bounds);
    if (!is_within_bounds && bound < FAR) return false;
    if (!is_within_bounds) throw Malformed(rank, table, column, "has a number outside [-2**62, 2**62)");
    if (width != width_of(bits)) throw Malformed(rank, table, column, "is wider than its differences");
  }
  return true;
}

template bool read_rows(const ScannedTable&, int64_t, int64_t, int64_t, int64_t, Matrix<int32_t>);
template bool read_rows(const ScannedTable&, int64_t, int64_t, int64_t, int64_t, Matrix<int64_t>);

}  // namespace apportion
