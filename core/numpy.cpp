#include "numpy.hpp"

namespace apportion {

void refuse(const char* name, const char* wanted, nb::handle object) {
  const nb::object attribute = nb::getattr(object, "dtype", nb::str("no dtype"));
  const std::string dtype = nb::str(nb::handle(attribute)).c_str();
  const std::string kind = nb::str(object.type().attr("__name__")).c_str();
  throw nb::type_error((std::string(name) + ": must be a numpy array, " + wanted + ", not " + kind + " of " + dtype).c_str());
}

void Buffer::open(nb::handle object, const char* name, int dimensions, bool writable) {
  const int flags = PyBUF_FORMAT | PyBUF_STRIDES | (writable ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) {
    view_.obj = nullptr;
    PyErr_Clear();
    refuse(name, writable ? "writable" : "readable", object);
  }
  if (view_.ndim != dimensions) refuse(name, dimensions == 1 ? "of one dimension" : "of two dimensions", object);
  const int inner = dimensions - 1;
  const bool is_nonempty = size(0) > 0 && size(inner) > 0;
  if (is_nonempty && size(inner) > 1 && view_.strides[inner] != view_.itemsize) refuse(name, "contiguous", object);
  if (is_nonempty && dimensions == 2 && size(0) > 1 && view_.strides[0] % view_.itemsize != 0)
    refuse(name, "aligned", object);
}

bool Buffer::is(char kind, int64_t bytes) const {
  const char* formats = kind == 'i' ? "bhilq" : kind == 'u' ? "BHILQ" : kind == 'f' ? "fd" : "?";  // 'b': bool
  const char* format = view_.format;
  return view_.itemsize == bytes && format[0] != '\0' && format[1] == '\0' && std::strchr(formats, format[0]) != nullptr;
}

void open_view(Ints& view, Buffer& buffer, nb::handle object, const char* name) {
  buffer.open(object, name, 1, false);
  const bool narrow = buffer.is('i', 4);
  if (!narrow && !buffer.is('i', 8)) refuse(name, "int32 or int64", object);
  view = {buffer.data(), narrow, buffer.size(0)};
}

void open_view(IntRows& view, Buffer& buffer, nb::handle object, const char* name) {
  buffer.open(object, name, 2, false);
  const bool narrow = buffer.is('i', 4);
  if (!narrow && !buffer.is('i', 8)) refuse(name, "int32 or int64", object);
  view = {buffer.data(), narrow, buffer.size(0), buffer.size(1), buffer.stride()};
}

}  // namespace apportion
