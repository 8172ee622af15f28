// The walk and the bands of its tasks, for apportion/ir/verify.
#include "bind.hpp"

#include "ir/verify/attended.hpp"
#include "ir/verify/judge.hpp"

namespace apportion {

using namespace verify;

namespace {

// A program with the arrays of its views.
class OwnProgram : public Program {
 public:
  // arrays: as `_prepared` of judge.py puts them together.
  OwnProgram(nb::tuple arrays, bool backward, std::uint32_t given_bits, std::uint32_t owed_bits,
             std::uint32_t foreign_bits, int64_t round_count)
      : arrays_(std::move(arrays)) {
    const auto rows = [this](const char* name) { return arrays_.next<IntRows>(name); };
    const auto offsets = [this] { return arrays_.next<Offsets>("ptr"); };
    const auto matrix = [this](const char* name) { return arrays_.next<Matrix<const int64_t>>(name); };
    IntRows table = rows("operands");
    operands = {table, offsets()};
    table = rows("instructions");
    instructions = {table[0], table[1], table[2], table[3], table[4], offsets()};
    table = rows("transfers");
    transfers = {table[0], table[1], table[2], offsets()};
    table = rows("tasks");
    tasks = backward ? Tasks{table[0], table[1], table[4], table[2], table[3], table[5], table[6], table[7], table[8], {}}
                     : Tasks{table[0], table[1], table[2], {}, {}, {}, table[3], table[4], table[5], {}};
    tasks.of_rank = offsets();
    table = rows("rowops");
    rowops = {table[0], table[1], table[2], table[3], table[4], offsets()};
    memory.home_rows = arrays_.next<Offsets>("home_rows");
    memory.first_address = arrays_.next<Offsets>("first_address");
    memory.arena_rows = matrix("arena_rows");
    memory.arena_heads = matrix("arena_heads");
    heads.bits = matrix("bits");
    heads.number = matrix("number");
    heads.size = matrix("size");
    heads.serves = arrays_.next<Matrix<const bool>>("serves");
    given = Tensors(given_bits);
    owed = Tensors(owed_bits);
    foreign = Tensors(foreign_bits);
    is_backward = backward;
    rounds = round_count;
  }

  OwnProgram(const OwnProgram&) = delete;
  OwnProgram& operator=(const OwnProgram&) = delete;

 private:
  Fields arrays_;
};

// int64 [8, pieces]; None for more than `most`.
nb::object cut_into_runs(Column<const Piece> pieces, const Homes& homes, int64_t most) {
  int64_t count = 0;
  if (!unlocked([&] { return cut(pieces, homes, most, [&](const WideBand&, const Piece&) { ++count; }); }))
    return nb::none();
  New2<int64_t> found(8, count);
  unlocked([&] {
    int64_t at = 0;
    cut(pieces, homes, most, [&](const WideBand& band, const Piece& piece) {
      const int64_t numbers[8] = {band.q0,   band.q1,   band.k0,          band.k1,
                                  band.dmin, band.dmax, piece.first_mark, piece.second_mark};
      for (int64_t column = 0; column < 8; ++column) found[column][at] = numbers[column];
      ++at;
    });
  });
  return found.array();
}

void bind_enums(nb::module_& m) {
  nb::enum_<Code>(m, "Code")
      .value("NO_FORM", Code::NO_FORM)
      .value("READ_UNWRITTEN", Code::READ_UNWRITTEN)
      .value("READ_IN_FLIGHT", Code::READ_IN_FLIGHT)
      .value("READ_PARTIAL", Code::READ_PARTIAL)
      .value("READ_OTHER_HEADS", Code::READ_OTHER_HEADS)
      .value("WRITE_SENDING", Code::WRITE_SENDING)
      .value("WRITE_IN_FLIGHT", Code::WRITE_IN_FLIGHT)
      .value("WRITE_GIVEN", Code::WRITE_GIVEN)
      .value("ADD_TO_UNWRITTEN", Code::ADD_TO_UNWRITTEN)
      .value("NOT_SAME_TOKENS", Code::NOT_SAME_TOKENS)
      .value("PARTIAL_SPENT", Code::PARTIAL_SPENT)
      .value("PARTIAL_LOST", Code::PARTIAL_LOST)
      .value("PARTIAL_MIXED", Code::PARTIAL_MIXED)
      .value("PARTIAL_LEFT", Code::PARTIAL_LEFT)
      .value("PARTIAL_FROM_HOME", Code::PARTIAL_FROM_HOME)
      .value("WRONG_HOME", Code::WRONG_HOME)
      .value("WRITTEN_TWICE", Code::WRITTEN_TWICE)
      .value("NOT_FINISHED", Code::NOT_FINISHED)
      .value("NOT_PRODUCED", Code::NOT_PRODUCED)
      .value("NO_RESULT", Code::NO_RESULT)
      .value("RESULT_TOUCHED", Code::RESULT_TOUCHED)
      .value("RESULT_HEADS", Code::RESULT_HEADS)
      .value("OTHER_KEYS", Code::OTHER_KEYS);
  nb::enum_<Verdict>(m, "Verdict")
      .value("WRONG", Verdict::WRONG)
      .value("RIGHT", Verdict::RIGHT)
      .value("ZEROS", Verdict::ZEROS)
      .value("TOO_MANY", Verdict::TOO_MANY);
}

void bind_lists(nb::module_& m) {
  nb::class_<Lists>(m, "Lists")
      .def(nb::init<int64_t>())
      .def_prop_ro("count", &Lists::count)
      .def_prop_ro("following",
                   [](const Lists& lists) {
                     New<int64_t> found(lists.sets());
                     for (int64_t set = 0; set < found.size(); ++set) found[set] = lists.followed_by(set);
                     return found.array();
                   })
      .def("begin", &Lists::begin)
      .def("end", [](Lists& lists, In<int64_t, "starts"> starts, In<int64_t, "tokens"> tokens, int64_t most) {
        lists.end();
        const Column<const Piece> every = lists.pieces();
        return cut_into_runs(every.slice(lists.at_begin(), every.size()), Homes(starts, tokens), most);
      });
}

void bind_trace(nb::module_& m) {
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
  nb::class_<Trace>(m, "Trace")
      .def_ro("faults", &Trace::faults)
      .def_ro("is_complete", &Trace::is_complete)
      .def("cut", [](const Trace& trace, In<int64_t, "starts"> starts, In<int64_t, "tokens"> tokens, int64_t most) {
        const Column<const Piece> parts(trace.parts.data(), static_cast<int64_t>(trace.parts.size()));
        return cut_into_runs(parts, Homes(starts, tokens), most);
      });
}

}  // namespace

void bind_verify(nb::module_& m) {
  m.attr("NOWHERE") = NOWHERE;
  bind_enums(m);
  bind_lists(m);
  bind_trace(m);
  nb::class_<OwnProgram>(m, "Program")
      .def(nb::init<nb::tuple, bool, std::uint32_t, std::uint32_t, std::uint32_t, int64_t>());

  m.def("judge", [](const OwnProgram& program, Lists& lists, bool together, int64_t threads, int64_t rows,
                    int64_t pieces) {
    const Judged judged = unlocked([&] { return judge(program, lists, together, {threads, rows, pieces}); });
    return nb::make_tuple(judged.verdict, judged.hanging);
  });
  m.def("trace", [](const OwnProgram& program, int64_t pieces) -> nb::object {
    try {
      return nb::cast(unlocked([&] { return trace(program, pieces); }));
    } catch (const TooMany&) {
      return nb::none();
    }
  });

  m.def("measure", [](In2<int64_t, "bands"> bands, In2<int64_t, "mask"> mask, int64_t steps) -> nb::object {
    New<int64_t> areas(bands.columns()), inside(bands.columns());
    if (!unlocked([&] { return measure({bands}, {mask}, steps, areas, inside); })) return nb::none();
    return nb::make_tuple(areas.array(), inside.array());
  });
  m.def("sweep", [](In2<int64_t, "bands"> bands, In<int64_t, "order"> order, int64_t steps,
                    int64_t most) -> nb::object {
    std::vector<Overlap> overlaps;
    if (!unlocked([&] { return sweep({bands}, order, steps, static_cast<std::size_t>(most), overlaps); }))
      return nb::none();
    New2<int64_t> found(static_cast<int64_t>(overlaps.size()), 3);
    for (int64_t i = 0; i < found.rows(); ++i) {
      const auto [first, second, pairs] = overlaps[static_cast<std::size_t>(i)];
      found[i][0] = first;
      found[i][1] = second;
      found[i][2] = pairs;
    }
    return found.array();
  });
}

}  // namespace apportion
