// Owned scratch memory, indexed like a view.
//
//   Scratch<T>   a Column of so many equal values       Scratch2<T>   a Matrix of them
#pragma once

#include <algorithm>
#include <memory>

#include "array.hpp"

namespace apportion {

template <class T>
class Scratch : public Column<T> {
 public:
  Scratch() = default;
  explicit Scratch(std::int64_t size, T value = {})
      : Scratch(size, std::make_unique_for_overwrite<T[]>(static_cast<std::size_t>(size))) {
    std::fill(this->begin(), this->end(), value);
  }
  template <class Values>
  static Scratch of(const Values& values) {
    Scratch made(values.size());
    for (std::int64_t i = 0; i < values.size(); ++i) made[i] = values[i];
    return made;
  }

 private:
  Scratch(std::int64_t size, std::unique_ptr<T[]> memory) : Column<T>(memory.get(), size), memory_(std::move(memory)) {}
  std::unique_ptr<T[]> memory_;
};

template <class T>
class Scratch2 : public Matrix<T> {
 public:
  Scratch2(std::int64_t rows, std::int64_t columns, T value = {})
      : Scratch2(rows, columns, Scratch<T>(rows * columns, value)) {}

 private:
  Scratch2(std::int64_t rows, std::int64_t columns, Scratch<T> memory)
      : Matrix<T>(memory.data(), rows, columns, columns), memory_(std::move(memory)) {}
  Scratch<T> memory_;
};

}  // namespace apportion
