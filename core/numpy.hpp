// Views of numpy arrays.
//
// Nothing is converted: a wrong dtype or number of dimensions, a read-only array for numbers that are not const, and
// non-contiguous numbers raise a TypeError that names the argument.
#pragma once

#include <nanobind/nanobind.h>

#include <concepts>

#include "array.hpp"

namespace apportion {

namespace nb = nanobind;

// A buffer of a Python object, released with it. Needs the GIL.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept : view_(other.view_) { other.view_.obj = nullptr; }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(view_, other.view_);
    return *this;
  }
  ~Buffer() {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
  }
  // Throws TypeError with the argument's name.
  void open(nb::handle object, const char* name, int dimensions, bool writable);

  // True if the numbers are of this kind, the first letter of a dtype, and size.
  bool is(char kind, int64_t bytes) const;
  void* data() const { return view_.buf; }
  int64_t size(int dimension) const { return view_.shape[dimension]; }
  // The distance between rows of a matrix, in numbers.
  int64_t stride() const { return size(0) > 1 ? view_.strides[0] / view_.itemsize : size(1); }

 private:
  Py_buffer view_{};
};

[[noreturn]] void refuse(const char* name, const char* wanted, nb::handle object);

template <class T>
inline constexpr const char* DTYPE = std::same_as<T, bool>      ? "bool"
                                     : std::same_as<T, uint8_t> ? "uint8"
                                     : std::same_as<T, int32_t> ? "int32"
                                     : std::same_as<T, int64_t> ? "int64"
                                                                : "float64";

template <template <class> class Shape, class T>
  requires std::same_as<Shape<T>, Column<T>> || std::same_as<Shape<T>, Matrix<T>>
void open_view(Shape<T>& view, Buffer& buffer, nb::handle object, const char* name) {
  using Number = std::remove_const_t<T>;
  constexpr bool is_matrix = std::same_as<Shape<T>, Matrix<T>>;
  buffer.open(object, name, 1 + is_matrix, !std::is_const_v<T>);
  if (!buffer.is(DTYPE<Number>[0], sizeof(T))) refuse(name, DTYPE<Number>, object);
  auto* const data = static_cast<T*>(buffer.data());
  if constexpr (is_matrix)
    view = {data, buffer.size(0), buffer.size(1), buffer.stride()};
  else
    view = {data, buffer.size(0)};
}
void open_view(Ints& view, Buffer& buffer, nb::handle object, const char* name);
void open_view(IntRows& view, Buffer& buffer, nb::handle object, const char* name);

// An uninitialized array owned by numpy, with a view for filling it. Creating it needs the GIL; filling it does not.
template <class View>
class NewArray : public View {
 public:
  template <class... Size>
  explicit NewArray(Size... size)
      : array_(nb::module_::import_("numpy").attr("empty")(nb::make_tuple(size...), DTYPE<typename View::value_type>)) {
    Buffer buffer;
    open_view(static_cast<View&>(*this), buffer, array_, "result");
  }
  nb::object array() const { return array_; }

 private:
  nb::object array_;
};

}  // namespace apportion
