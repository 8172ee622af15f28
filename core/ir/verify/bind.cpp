// The walk and the bands of its tasks, for apportion/ir/verify.
#include "bind.hpp"

#include <nanobind/stl/vector.h>

#include "ir/verify/attended.hpp"
#include "ir/verify/judge.hpp"

namespace apportion {

using namespace verify;

namespace {

// int64 [8, pieces]: bands of tokens, and marks; none if there are more than `limit`.
std::optional<Array2<int64_t>> cut_into_runs(Column<const Piece> pieces, const Homes& homes, int64_t limit) {
  int64_t count = 0, at = 0;
  if (!cut(pieces, homes, limit, [&](const WideBand&, const Piece&) { ++count; })) return {};
  Array2<int64_t> result(8, count);
  cut(pieces, homes, limit, [&](const WideBand& band, const Piece& piece) {
    const int64_t numbers[8] = {band.q0,   band.q1,   band.k0,          band.k1,
                                band.dmin, band.dmax, piece.first_mark, piece.second_mark};
    for (int64_t column = 0; column < 8; ++column) result[column][at] = numbers[column];
    ++at;
  });
  return result;
}

// Binds an enum. names: "Name(VALUE, ...)", with the values from 0 on in the order of its definition.
template <class Enum>
void bind_enum(nb::module_& m, const char* names) {
  const Signature signature(names);
  nb::enum_<Enum> values(m, signature.name.c_str());
  for (std::size_t value = 0; value < signature.arguments.size(); ++value)
    values.value(signature.arguments[value].c_str(), static_cast<Enum>(value));
}

}  // namespace

static const Area area("verify", [](nb::module_& m) {
  m.attr("NOWHERE") = NOWHERE;
  bind_enum<Code>(m, CODE_NAMES);
  bind_enum<Verdict>(m, "Verdict(WRONG, RIGHT, ZEROS, TOO_MANY)");
  nb::class_<Lists>(m, "Lists").def(nb::init<int64_t>()).def_prop_ro("count", &Lists::count).def("begin", &Lists::begin);
  def(m, "following(lists)", +[](Lists& lists) {
    Array<int64_t> list_numbers(lists.sets());
    for (int64_t set = 0; set < list_numbers.size(); ++set) list_numbers[set] = lists.followed_by(set);
    return list_numbers;
  });
  def(m, "end(lists, starts, tokens, most)",
      +[](Lists& lists, Column<const int64_t> starts, Column<const int64_t> tokens, int64_t limit) {
        lists.end();
        const Column<const Piece> all_pieces = lists.pieces();
        return cut_into_runs(all_pieces.slice(lists.first_piece(), all_pieces.size()), Homes(starts, tokens), limit);
      });
  nb::class_<Fault>(m, "Fault")
      .def_ro("code", &Fault::code)
      .def_ro("rank", &Fault::rank)
      .def_ro("holds", &Fault::holds)
      .def_ro("wanted", &Fault::wanted)
      .def_prop_ro("instruction", [](const Fault& fault) { return fault.position.instruction; })
      .def_prop_ro("item", [](const Fault& fault) { return fault.position.item; })
      .def_prop_ro("tensor", [](const Fault& fault) { return static_cast<int>(fault.place.tensor); })
      .def_prop_ro("space", [](const Fault& fault) { return static_cast<int>(fault.place.space); })
      .def_prop_ro("low", [](const Fault& fault) { return fault.place.low; })
      .def_prop_ro("high", [](const Fault& fault) { return fault.place.high; });
  nb::class_<Trace>(m, "Trace").def_ro("faults", &Trace::faults).def_ro("is_complete", &Trace::is_complete);
  def(m, "trace(program, pieces)", trace);
  def(m, "cut(trace, starts, tokens, most)",
      +[](const Trace& trace, Column<const int64_t> starts, Column<const int64_t> tokens, int64_t limit) {
        return cut_into_runs(trace.parts, Homes(starts, tokens), limit);
      });
  def(m, "judge(program, lists, together, limits)", judge);
  def(m, "measure(bands, mask, steps)", measure);
  def(m, "sweep(bands, order, steps, most)", sweep);
});

}  // namespace apportion
