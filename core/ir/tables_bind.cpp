#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "ir/tables.hpp"

namespace apportion {

namespace {

std::vector<nb::bytes> encode(nb::list tables, int64_t first, int64_t end) {
  Opener opener;
  const auto views = opener.open<std::vector<Table>>(tables, "tables");
  std::vector<uint8_t> widths;
  std::vector<int64_t> sizes;
  without_gil([&] {
    for (int64_t rank = first; rank < end; ++rank) sizes.push_back(measure_part(views, rank, widths));
  });
  std::vector<nb::bytes> parts;
  std::vector<uint8_t*> outs;  // buffers of bytes objects not yet shared
  for (const int64_t size : sizes) {
    parts.push_back(nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, size)));
    if (!parts.back().is_valid()) throw nb::python_error();
    outs.push_back(reinterpret_cast<uint8_t*>(PyBytes_AsString(parts.back().ptr())));
  }
  without_gil([&] {
    const uint8_t* cursor = widths.data();
    for (int64_t rank = first; rank < end; ++rank)
      cursor = encode_part(views, rank, cursor, outs[static_cast<std::size_t>(rank - first)]);
  });
  return parts;
}

template <class Number>
bool fill(const std::vector<std::vector<ScannedTable>>& scanned, std::size_t table, int64_t bound, Matrix<Number> values) {
  return without_gil([&] {
    int64_t first = 0;
    for (std::size_t rank = 0; rank < scanned.size(); ++rank) {
      const ScannedTable& part = scanned[rank][table];
      const auto rank_index = static_cast<int64_t>(rank), table_index = static_cast<int64_t>(table);
      if (!read_rows(part, rank_index, table_index, bound, first, values)) return false;
      first += part.rows;
    }
    return true;
  });
}

nb::object values_of(const std::vector<std::vector<ScannedTable>>& scanned, std::size_t table, int64_t columns, int64_t rows,
                     bool narrow) {
  if (narrow) {
    NewArray<Matrix<int32_t>> values(columns, rows);
    if (fill<int32_t>(scanned, table, NARROW, values)) return values.array();
  }
  NewArray<Matrix<int64_t>> values(columns, rows);
  fill<int64_t>(scanned, table, FAR, values);
  return values.array();
}

nb::list decode(std::vector<nb::bytes> parts, std::vector<int64_t> columns, std::vector<bool> narrow) {
  std::vector<Reader> readers;
  for (const nb::bytes& part : parts)
    readers.emplace_back(static_cast<const uint8_t*>(part.data()), static_cast<int64_t>(part.size()));
  std::vector<std::vector<ScannedTable>> scanned(parts.size());
  without_gil([&] {
    for (std::size_t rank = 0; rank < readers.size(); ++rank)
      scanned[rank] = scan_part(readers[rank], columns, static_cast<int64_t>(rank));
  });
  nb::list tables;
  for (std::size_t table = 0; table < columns.size(); ++table) {
    NewArray<Column<int64_t>> ptr(static_cast<int64_t>(parts.size()) + 1);
    ptr[0] = 0;
    for (int64_t rank = 0; rank + 1 < ptr.size(); ++rank)
      ptr[rank + 1] = ptr[rank] + scanned[static_cast<std::size_t>(rank)][table].rows;
    const int64_t rows = ptr[ptr.size() - 1];
    tables.append(nb::make_tuple(ptr.array(), values_of(scanned, table, columns[table], rows, narrow.at(table))));
  }
  return tables;
}

// Sets the Python exception `Malformed` with (rank, table, column, what).
void translate(const std::exception_ptr& thrown, void* type) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Malformed& fault) {
    const nb::tuple args = nb::make_tuple(fault.rank, fault.table, fault.column, fault.what());
    PyErr_SetObject(static_cast<PyObject*>(type), args.ptr());
  }
}

}  // namespace

static const Area area("tables", [](nb::module_& m) {
  PyObject* malformed = PyErr_NewException("apportion._core.tables.Malformed", PyExc_ValueError, nullptr);
  m.attr("Malformed") = nb::steal(malformed);
  nb::register_exception_translator(translate, malformed);
  m.attr("MAX_ROWS") = MAX_ROWS;
  m.def("encode", &encode);
  m.def("decode", &decode);
  def(m, "out_of_range(table, ranges)", +[](const Table& table, Matrix<const int64_t> ranges) {
    return out_of_range(table, 0, ranges, 0);
  });
  def(m, "refusal(tables, ranges, foreign)", refusal);
});

}  // namespace apportion
