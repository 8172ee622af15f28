// Memory that loops own, indexed like a view. A loop's result becomes a numpy array without a copy (`bind.hpp`).
//
//   Array<T>     a Column, initialized to a value       Array2<T>   a Matrix, initialized to a value
//   Growing<T>   a std::vector
#pragma once

#include "array.hpp"

namespace apportion {

template <class T>
class Array : public Column<T> {
 public:
  Array() = default;
  explicit Array(int64_t size, T value = {})
      : Column<T>(new T[static_cast<std::size_t>(size)], size), memory_(this->data()) {
    std::fill(this->begin(), this->end(), value);
  }
  template <class Values>
  static Array of(const Values& values) {
    Array copy(values.size());
    for (int64_t i = 0; i < values.size(); ++i) copy[i] = values[i];
    return copy;
  }

 private:
  std::unique_ptr<T[]> memory_;
};

template <class T>
class Array2 : public Matrix<T> {
 public:
  Array2(int64_t rows, int64_t columns, T value = {}) : Array2(rows, columns, Array<T>(rows * columns, value)) {}

 private:
  Array2(int64_t rows, int64_t columns, Array<T> memory)
      : Matrix<T>(memory.data(), rows, columns, columns), memory_(std::move(memory)) {}
  Array<T> memory_;
};

template <class T>
class Growing : public std::vector<T> {
 public:
  using std::vector<T>::vector;
  int64_t count() const { return static_cast<int64_t>(this->size()); }
  void expect(int64_t more) { this->reserve(static_cast<std::size_t>(count() + more)); }
  void fill(int64_t count, T value) { this->assign(static_cast<std::size_t>(count), value); }
  T& operator[](int64_t index) { return Column<T>(*this)[index]; }
  const T& operator[](int64_t index) const { return Column<const T>(*this)[index]; }
  operator Column<T>() { return {this->data(), count()}; }
  operator Column<const T>() const { return {this->data(), count()}; }
};

// The numbers [0, count) in the order of `before`; equal ones stay in place.
template <class Index = int64_t, class Before>
Growing<Index> ordered(int64_t count, Before&& before) {
  Growing<Index> order(count);
  std::iota(order.begin(), order.end(), 0);
  if (!std::is_sorted(order.begin(), order.end(), before)) std::stable_sort(order.begin(), order.end(), before);
  return order;
}

// Moves the arrays into a tuple, to return them.
template <class... T>
std::tuple<T...> moved(T&... each) {
  return {std::move(each)...};
}

}  // namespace apportion
