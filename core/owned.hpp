// Memory that loops own, indexed like a view. A loop's result becomes a numpy array without a copy (`bind.hpp`).
//
//   Array<T>     a Column, initialized to a value       Array2<T>   a Matrix, initialized to a value
//   Growing<T>   a std::vector
#pragma once

#include <algorithm>
#include <memory>
#include <tuple>
#include <vector>

#include "array.hpp"

namespace apportion {

template <class T>
class Array : public Column<T> {
 public:
  Array() = default;
  explicit Array(std::int64_t size, T value = {})
      : Column<T>(new T[static_cast<std::size_t>(size)], size), memory_(this->data()) {
    std::fill(this->begin(), this->end(), value);
  }
  template <class Values>
  static Array of(const Values& values) {
    Array copy(values.size());
    for (std::int64_t i = 0; i < values.size(); ++i) copy[i] = values[i];
    return copy;
  }

 private:
  std::unique_ptr<T[]> memory_;
};

template <class T>
class Array2 : public Matrix<T> {
 public:
  Array2(std::int64_t rows, std::int64_t columns, T value = {})
      : Array2(rows, columns, Array<T>(rows * columns, value)) {}

 private:
  Array2(std::int64_t rows, std::int64_t columns, Array<T> memory)
      : Matrix<T>(memory.data(), rows, columns, columns), memory_(std::move(memory)) {}
  Array<T> memory_;
};

template <class T>
class Growing : public std::vector<T> {
 public:
  using std::vector<T>::vector;
  std::int64_t count() const { return static_cast<std::int64_t>(this->size()); }
  void expect(std::int64_t more) { this->reserve(static_cast<std::size_t>(count() + more)); }
  void fill(std::int64_t count, T value) { this->assign(static_cast<std::size_t>(count), value); }
  T& operator[](std::int64_t index) { return Column<T>(*this)[index]; }
  const T& operator[](std::int64_t index) const { return Column<const T>(*this)[index]; }
  operator Column<T>() { return {this->data(), count()}; }
  operator Column<const T>() const { return {this->data(), count()}; }
};

// Moves the arrays into a tuple, to return them.
template <class... T>
std::tuple<T...> moved(T&... each) {
  return {std::move(each)...};
}

}  // namespace apportion
