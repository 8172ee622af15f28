// A std::vector, indexed like a view.
#pragma once

#include <vector>

#include "array.hpp"

namespace apportion {

template <class T>
class Growing : public std::vector<T> {
 public:
  using std::vector<T>::vector;
  std::int64_t count() const { return static_cast<std::int64_t>(this->size()); }
  void expect(std::int64_t more) { this->reserve(static_cast<std::size_t>(count() + more)); }
  void fill(std::int64_t count, T value) { this->assign(static_cast<std::size_t>(count), value); }
  T& operator[](std::int64_t index) { return Column<T>(this->data(), count())[index]; }
  const T& operator[](std::int64_t index) const { return Column<const T>(this->data(), count())[index]; }
};

}  // namespace apportion
