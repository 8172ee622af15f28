// Makes loops functions of the extension: def(m, "sums(rows, ptr)", sums).
//
//   argument   Column, Matrix, Ints, IntRows      from an array
//              an aggregate                       from a tuple with a value per member, or the first FIELDS members; with
//                                                 NAMES, from the attributes of these names or paths
//              a type with `Given`                from a value of type `Given`
//              std::unique_ptr                    from None or a value
//              std::vector                        from a sequence
//   result     Array, Array2, Growing of numbers  an array
//              Growing of structs of integers     an array, with a row per member of the struct
//              std::tuple, pair, array            a tuple; for a struct, what its `fields` returns
//              std::optional                      the value or None
//
// The buffers of arrays are held during the call. Loops run without the GIL.
#pragma once

#include <nanobind/ndarray.h>

#include <deque>

#include "numpy.hpp"
#include "owned.hpp"

namespace apportion {

// A submodule whose stub is apportion/_core/NAME.pyi. bind: adds its members.
struct Area {
  Area(const char* area_name, void (*area_bind)(nb::module_&)) : name(area_name), bind(area_bind) {
    all().push_back(*this);
  }
  static std::vector<Area>& all() {
    static std::vector<Area> areas;
    return areas;
  }
  const char* name;
  void (*bind)(nb::module_&);
};

// Parses a signature "name(first, second)".
struct Signature {
  explicit Signature(const char* text);
  std::string name;
  std::vector<std::string> arguments;
};

// Runs a loop without the GIL. The loop and its result use only views and owned memory, no Python objects.
template <class Loop>
auto without_gil(Loop&& loop) {
  nb::gil_scoped_release released;
  return loop();
}

template <class T>
concept View = requires(T& view, Buffer& buffer, nb::handle object) { open_view(view, buffer, object, ""); };

template <class T>
inline constexpr bool IS_SEQUENCE = false;
template <class T>
inline constexpr bool IS_SEQUENCE<std::vector<T>> = true;

// True for arguments that are converted here rather than by nanobind.
template <class T>
inline constexpr bool IS_OPENED = View<T> || IS_SEQUENCE<T> || std::is_aggregate_v<T> || requires { typename T::Given; };

// The number of members of an aggregate.
struct AnyMember {
  template <class T>
  operator T() const;
};
template <class T, class... Members>
consteval std::size_t count_members() {
  if constexpr (requires { T::FIELDS; })
    return T::FIELDS;
  else if constexpr (requires { T{Members()..., AnyMember()}; })
    return count_members<T, Members..., AnyMember>();
  else
    return sizeof...(Members);
}

template <class T>
using Passed = std::conditional_t<IS_OPENED<std::remove_cvref_t<T>>, nb::handle, T>;
template <class T>
using Taken = std::conditional_t<IS_OPENED<std::remove_cvref_t<T>>, std::remove_cvref_t<T>, T>;

// Converts the arguments of loops and keeps their arrays open. name: the argument's, for errors.
class Opener {
 public:
  template <class T, class Given>
  decltype(auto) take(Given& object, const char* name) {
    if constexpr (IS_OPENED<T>)
      return open<T>(object, name);
    else
      return (object);
  }
  template <class T>
  T open(nb::handle object, const char* name) {
    if constexpr (View<T>) {
      T view;
      open_view(view, buffers_.emplace_back(), object, name);
      return view;
    } else if constexpr (IS_SEQUENCE<T>) {
      T items;
      for (const nb::handle item : object) items.push_back(open<typename T::value_type>(item, name));
      return items;
    } else if constexpr (std::is_aggregate_v<T>) {
      const nb::tuple members = members_of<T>(object);
      if (members.size() != count_members<T>()) throw nb::type_error(name);
      return [&]<std::size_t... index>(std::index_sequence<index...>) {
        return T{Field{*this, members[index], name}...};
      }(std::make_index_sequence<count_members<T>()>());
    } else if constexpr (requires { typename T::Given; }) {
      return T(open<typename T::Given>(object, name));
    } else if constexpr (requires { typename T::element_type; }) {
      using Kept = std::remove_const_t<typename T::element_type>;
      return object.is_none() ? T() : std::make_unique<Kept>(open<Kept>(object, name));
    } else {
      return nb::cast<T>(object);
    }
  }

 private:
  struct Field {
    Opener& opener;
    nb::handle object;
    const char* name;
    template <class T>
    operator T() const {
      return opener.open<T>(object, name);
    }
  };
  template <class T>
  static nb::tuple members_of(nb::handle object) {
    if constexpr (requires { T::NAMES; }) {
      const nb::object attrgetter = nb::module_::import_("operator").attr("attrgetter");
      return nb::borrow<nb::tuple>(attrgetter(*nb::str(T::NAMES).attr("split")())(object));
    } else {
      return nb::cast<nb::tuple>(object);
    }
  }

  std::deque<Buffer> buffers_;
};

// An array over the memory of an object, which it keeps alive.
template <class Kept, class... Size>
nb::object array_over(Kept&& memory, Size... size) {
  using Memory = std::remove_cvref_t<Kept>;
  auto* kept = new Memory(std::forward<Kept>(memory));
  nb::capsule owner(kept, [](void* object) noexcept { delete static_cast<Memory*>(object); });
  using Number = typename Memory::value_type;
  return nb::cast(nb::ndarray<nb::numpy, Number, nb::ndim<sizeof...(Size)>>(kept->data(), {std::size_t(size)...}, owner));
}

// The columns of structs of int32 or of int64.
template <class Row, class Number = std::conditional_t<alignof(Row) == 8, int64_t, int32_t>>
Array2<Number> columns_of(const Growing<Row>& rows) {
  constexpr std::size_t width = sizeof(Row) / sizeof(Number);
  Array2<Number> columns(width, rows.count());
  for (int64_t row = 0; row < rows.count(); ++row) {
    const auto numbers = std::bit_cast<std::array<Number, width>>(rows[row]);
    for (std::size_t column = 0; column < width; ++column) columns[static_cast<int64_t>(column)][row] = numbers[column];
  }
  return columns;
}

template <class T>
nb::object returned(T&& result) {
  using Result = std::remove_cvref_t<T>;
  if constexpr (requires { result.fields(); }) {
    return returned(result.fields());
  } else if constexpr (requires { typename Result::value_type; result.has_value(); }) {
    return result ? returned(std::move(*result)) : nb::none();
  } else if constexpr (requires { std::tuple_size<Result>::value; }) {
    return std::apply([](auto&... each) -> nb::object { return nb::make_tuple(returned(std::move(each))...); }, result);
  } else if constexpr (requires { result.columns(); }) {
    const auto rows = result.rows(), columns = result.columns();
    return array_over(std::move(result), rows, columns);
  } else if constexpr (requires { result.data(); }) {
    if constexpr (std::is_class_v<typename Result::value_type>)
      return returned(without_gil([&] { return columns_of(result); }));
    else {
      const auto size = result.size();
      return array_over(std::move(result), size);
    }
  } else {
    return nb::cast(std::move(result));
  }
}

// text: the signature as in the stub. nanobind converts the arguments that are not converted here.
template <class Result, class... Given>
void define(nb::module_& m, const char* text, Result (*loop)(Given...)) {
  const Signature signature(text);
  m.def(signature.name.c_str(), [loop, signature](Passed<Given>... object) {
    Opener opener;
    auto name = signature.arguments.begin();
    std::tuple<Taken<Given>...> inputs{opener.take<Taken<Given>>(object, (name++)->c_str())...};
    if constexpr (std::is_void_v<Result>) {
      without_gil([&] { std::apply(loop, inputs); });
      return nb::none();
    } else {
      return returned(without_gil([&] { return std::apply(loop, inputs); }));
    }
  });
}
template <class Loop>
void def(nb::module_& m, const char* signature, Loop loop) {
  define(m, signature, +loop);
}

}  // namespace apportion
