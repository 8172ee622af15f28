// Argument and result types that map numpy arrays to views.
//
//   In<T, "name">     Column<const T>     In2<T, "name">    Matrix<const T>
//   Out<T, "name">    Column<T>           Out2<T, "name">   Matrix<T>
//   IntsIn<"name">    Ints                IntsIn2<"name">   IntRows
//   nb::tuple         a NamedTuple of arrays, whose views `Fields` opens
//
// Each is its view, so it can be passed to a loop as one. An array of another dtype or number of dimensions, a
// read-only one for Out, and non-contiguous numbers are a TypeError that names the argument: nothing is converted.
// New<T> is a result of known size, handed(vector) one of unknown size.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <concepts>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "array.hpp"

namespace apportion {

namespace nb = nanobind;

template <std::size_t N>
struct Name {
  char text[N];
  consteval Name(const char (&given)[N]) {
    for (std::size_t i = 0; i < N; ++i) text[i] = given[i];
  }
};

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
  // Throws TypeError, which names the argument.
  void open(nb::handle object, const char* name, int dimensions, bool writable);

  // True if numbers are of a kind ('i', 'u', 'f' or '?') and a number of bytes.
  bool is(char kind, std::int64_t bytes) const;
  void* data() const { return view_.buf; }
  std::int64_t size(int dimension) const { return view_.shape[dimension]; }
  // Distance between rows of a matrix, in numbers.
  std::int64_t stride() const { return size(0) > 1 ? view_.strides[0] / view_.itemsize : size(1); }

 private:
  Py_buffer view_{};
};

[[noreturn]] void refuse(const char* name, const char* wanted, nb::handle given);

template <class T>
inline constexpr char KIND = std::same_as<T, bool>       ? '?'
                             : std::floating_point<T>    ? 'f'
                             : std::is_unsigned_v<T> ? 'u'
                                                         : 'i';
template <class T>
inline constexpr const char* DTYPE = "";
template <>
inline constexpr const char* DTYPE<std::int64_t> = "int64";
template <>
inline constexpr const char* DTYPE<std::int32_t> = "int32";
template <>
inline constexpr const char* DTYPE<std::uint8_t> = "uint8";
template <>
inline constexpr const char* DTYPE<double> = "float64";
template <>
inline constexpr const char* DTYPE<bool> = "bool";

template <class T>
void open_view(Column<T>& view, Buffer& buffer, nb::handle object, const char* name) {
  using Number = std::remove_const_t<T>;
  buffer.open(object, name, 1, !std::is_const_v<T>);
  if (!buffer.is(KIND<Number>, sizeof(T))) refuse(name, DTYPE<Number>, object);
  view = {static_cast<T*>(buffer.data()), buffer.size(0)};
}

template <class T>
void open_view(Matrix<T>& view, Buffer& buffer, nb::handle object, const char* name) {
  using Number = std::remove_const_t<T>;
  buffer.open(object, name, 2, !std::is_const_v<T>);
  if (!buffer.is(KIND<Number>, sizeof(T))) refuse(name, DTYPE<Number>, object);
  view = {static_cast<T*>(buffer.data()), buffer.size(0), buffer.size(1), buffer.stride()};
}

void open_view(Ints& view, Buffer& buffer, nb::handle object, const char* name);
void open_view(IntRows& view, Buffer& buffer, nb::handle object, const char* name);

template <class View, Name name>
struct Argument : View {
  Buffer buffer;
};

template <class T, Name name>
using In = Argument<Column<const T>, name>;
template <class T, Name name>
using Out = Argument<Column<T>, name>;
template <class T, Name name>
using In2 = Argument<Matrix<const T>, name>;
template <class T, Name name>
using Out2 = Argument<Matrix<T>, name>;
template <Name name>
using IntsIn = Argument<Ints, name>;
template <Name name>
using IntsIn2 = Argument<IntRows, name>;

// The arrays of a NamedTuple, in order: Fields own(given); Lists{own.next<Ints>("tiles"), ...}. It keeps them open.
class Fields {
 public:
  explicit Fields(nb::tuple arrays) : arrays_(std::move(arrays)), buffers_(arrays_.size()) {}
  template <class View>
  View next(const char* name) {
    View view;
    if (at_ == buffers_.size()) throw nb::type_error(name);
    open_view(view, buffers_[at_], arrays_[at_], name);
    ++at_;
    return view;
  }

 private:
  nb::tuple arrays_;
  std::vector<Buffer> buffers_;
  std::size_t at_ = 0;
};

// An uninitialized array owned by numpy, with a view to fill it. Create it with the GIL; filling does not need it.
template <class T>
class New : public Column<T> {
 public:
  explicit New(std::int64_t size) : New(nb::module_::import_("numpy").attr("empty")(size, DTYPE<T>)) {}
  nb::object array() const { return array_; }

 private:
  explicit New(nb::object array) : array_(std::move(array)) {
    Buffer buffer;
    open_view(static_cast<Column<T>&>(*this), buffer, array_, "result");
  }
  nb::object array_;
};

template <class T>
class New2 : public Matrix<T> {
 public:
  New2(std::int64_t rows, std::int64_t columns)
      : New2(nb::module_::import_("numpy").attr("empty")(nb::make_tuple(rows, columns), DTYPE<T>)) {}
  nb::object array() const { return array_; }

 private:
  explicit New2(nb::object array) : array_(std::move(array)) {
    Buffer buffer;
    open_view(static_cast<Matrix<T>&>(*this), buffer, array_, "result");
  }
  nb::object array_;
};

// Runs a loop without the GIL. The loop uses views only, no Python objects, results included.
template <class Loop>
auto unlocked(Loop&& loop) {
  nb::gil_scoped_release released;
  return loop();
}

// A vector as an array, without a copy.
template <class T>
nb::object handed(std::vector<T>&& numbers) {
  auto* kept = new std::vector<T>(std::move(numbers));
  nb::capsule owner(kept, [](void* given) noexcept { delete static_cast<std::vector<T>*>(given); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(kept->data(), {kept->size()}, owner));
}

// Vectors as a tuple of arrays, likewise.
template <class... T>
nb::tuple arrays_of(std::vector<T>&... vectors) {
  return nb::make_tuple(handed(std::move(vectors))...);
}

}  // namespace apportion

namespace nanobind::detail {

template <class View, apportion::Name name>
struct type_caster<apportion::Argument<View, name>> {
  using Argument = apportion::Argument<View, name>;
  NB_TYPE_CASTER(Argument, const_name("numpy.ndarray"))

  bool from_python(handle object, std::uint8_t, cleanup_list*) {
    apportion::open_view(static_cast<View&>(value), value.buffer, object, name.text);
    return true;
  }
};

}  // namespace nanobind::detail
