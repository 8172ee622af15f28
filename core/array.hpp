// Array views for loops. They own no memory and do not depend on Python.
//
//   Column<T>      one dimension, T* and a size; Column<const T> is read only
//   Matrix<T>      two dimensions, rows of contiguous numbers; rows may be strided
//   Ints, IntRows  the same, read only, of int32 or int64 as in a table's array; numbers are read as int64
//   Reader         untrusted bytes, always checked: throws Truncated
//
// Also includes the standard library's headers that most loops use.
//
// The sanitizer build (`make sanitize`) checks every index of every view; errors are std::out_of_range, in Python
// IndexError.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace apportion {

using std::int32_t, std::int64_t, std::uint32_t, std::uint64_t, std::uint8_t;

#ifdef APPORTION_CHECKED
inline constexpr bool CHECKED = true;
#else
inline constexpr bool CHECKED = false;
#endif

inline void check_index(int64_t index, int64_t size) {
  if constexpr (CHECKED) {
    if (static_cast<uint64_t>(index) >= static_cast<uint64_t>(size))
      throw std::out_of_range("index " + std::to_string(index) + " of " + std::to_string(size));
  }
}

inline void check_range(int64_t first, int64_t end, int64_t size) {
  if constexpr (CHECKED) {
    if (first < 0 || first > end || end > size)
      throw std::out_of_range("range " + std::to_string(first) + " to " + std::to_string(end) + " of " +
                              std::to_string(size));
  }
}

template <class T>
class Column {
 public:
  using value_type = T;
  Column() = default;
  Column(T* data, int64_t size) : data_(data), size_(size) {}

  int64_t size() const { return size_; }
  T* data() const { return data_; }
  T* begin() const { return data_; }
  T* end() const { return data_ + size_; }
  T& operator[](int64_t index) const {
    check_index(index, size_);
    return data_[index];
  }
  Column slice(int64_t first, int64_t end) const {
    check_range(first, end, size_);
    return {data_ + first, end - first};
  }
  operator Column<const T>() const { return {data_, size_}; }

 private:
  T* data_ = nullptr;
  int64_t size_ = 0;
};

template <class T>
class Matrix {
 public:
  using value_type = T;
  Matrix() = default;
  // stride: the distance between rows, in numbers
  Matrix(T* data, int64_t rows, int64_t columns, int64_t stride)
      : data_(data), rows_(rows), columns_(columns), stride_(stride) {}

  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  T* data() const { return data_; }
  Column<T> operator[](int64_t row) const {
    check_index(row, rows_);
    return {data_ + row * stride_, columns_};
  }

 private:
  T* data_ = nullptr;
  int64_t rows_ = 0, columns_ = 0, stride_ = 0;
};

class Ints {
 public:
  Ints() = default;
  Ints(const void* data, bool narrow, int64_t size) : data_(data), narrow_(narrow), size_(size) {}

  int64_t size() const { return size_; }
  bool narrow() const { return narrow_; }
  int64_t operator[](int64_t index) const {
    check_index(index, size_);
    return narrow_ ? static_cast<const int32_t*>(data_)[index] : static_cast<const int64_t*>(data_)[index];
  }
  // Applies `loop` to the column with its own type, so that hot loops are compiled for each type.
  template <class Loop>
  auto visit(Loop&& loop) const {
    if (narrow_) return loop(Column<const int32_t>(static_cast<const int32_t*>(data_), size_));
    return loop(Column<const int64_t>(static_cast<const int64_t*>(data_), size_));
  }

 private:
  const void* data_ = nullptr;
  bool narrow_ = false;
  int64_t size_ = 0;
};

class IntRows {
 public:
  IntRows() = default;
  IntRows(const void* data, bool narrow, int64_t rows, int64_t columns, int64_t stride)
      : data_(data), narrow_(narrow), rows_(rows), columns_(columns), stride_(stride) {}

  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  Ints operator[](int64_t row) const {
    check_index(row, rows_);
    const int64_t bytes = row * stride_ * (narrow_ ? 4 : 8);
    return {static_cast<const char*>(data_) + bytes, narrow_, columns_};
  }
  // Like `Ints::visit`, for a matrix.
  template <class Loop>
  auto visit(Loop&& loop) const {
    if (narrow_)
      return loop(Matrix<const int32_t>(static_cast<const int32_t*>(data_), rows_, columns_, stride_));
    return loop(Matrix<const int64_t>(static_cast<const int64_t*>(data_), rows_, columns_, stride_));
  }

 private:
  const void* data_ = nullptr;
  bool narrow_ = false;
  int64_t rows_ = 0, columns_ = 0, stride_ = 0;
};

// A table: the rows of all ranks, rank after rank, as columns. ptr: the first row of each rank, and the end.
struct Table {
  Column<const int64_t> ptr;
  IntRows columns;

  int64_t ranks() const { return ptr.size() - 1; }
  int64_t size() const { return columns.columns(); }
};

// Thrown if untrusted bytes end too early.
struct Truncated : std::out_of_range {
  Truncated() : std::out_of_range("the bytes end too early") {}
};

class Reader {
 public:
  Reader(const uint8_t* data, int64_t size) : cursor_(data), left_(size) {}

  int64_t left() const { return left_; }
  // The next `count` bytes, bounds checked.
  const uint8_t* take(int64_t count) {
    if (count < 0 || count > left_) throw Truncated();
    const uint8_t* start = cursor_;
    cursor_ += count;
    left_ -= count;
    return start;
  }
  uint8_t byte() { return *take(1); }
  uint32_t u32() {
    const uint8_t* b = take(4);
    return static_cast<uint32_t>(b[0]) | static_cast<uint32_t>(b[1]) << 8 |
           static_cast<uint32_t>(b[2]) << 16 | static_cast<uint32_t>(b[3]) << 24;
  }

 private:
  const uint8_t* cursor_;
  int64_t left_;
};

}  // namespace apportion
