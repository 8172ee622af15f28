#include "planner/lower/given.hpp"

namespace apportion::lower {

namespace {

// Views of the arrays in a Python object's fields.
class Fields {
 public:
  Fields(nb::object of, std::deque<Buffer>& buffers) : of_(std::move(of)), buffers_(buffers) {}

  Fields at(const char* name) const { return {of_.attr(name), buffers_}; }
  bool there(const char* name) const { return !of_.attr(name).is_none(); }
  int64_t number(const char* name) const { return nb::cast<int64_t>(of_.attr(name)); }
  double real(const char* name) const { return nb::cast<double>(of_.attr(name)); }
  bool flag(const char* name) const { return nb::cast<bool>(of_.attr(name)); }
  operator Ints() const { return view<Ints>(); }
  operator IntRows() const { return view<IntRows>(); }
  operator Column<const bool>() const { return view<Column<const bool>>(); }

 private:
  template <class View>
  View view() const {
    View found;
    open_view(found, buffers_.emplace_back(), of_, "an array of the lowering");
    return found;
  }

  nb::object of_;
  std::deque<Buffer>& buffers_;
};

Schedule schedule_of(const Fields& given) {
  const bool has_back = given.there("back");
  return {given.at("round"), given.at("routed").at("returns_to"), has_back ? Ints(given.at("back")) : Ints(),
          given.at("when"), given.at("channel"), given.number("buffers"), given.number("leads"),
          given.number("tails"), given.number("levels"), has_back, given.there("division")};
}

std::unique_ptr<Exchange> exchange_of(const Fields& given, int64_t results) {
  const Fields pieces = given.at("pieces"), slots = given.at("slots");
  auto exchange = std::make_unique<Exchange>(
      Exchange{given.at("piece"), given.at("dst"), pieces.at("src"), pieces.at("src_row"), pieces.at("row"),
               pieces.at("rows"), slots.at("round"), given.at("first"), given.at("home").at("per_rank"),
               slots.number("rounds"), given.number("mode"), results, given.flag("direct"), given.flag("sums"),
               given.there("turns"), {}, {}, {}});
  if (exchange->has_turns) {
    const Fields turns = given.at("turns");
    exchange->late = turns.at("late");
    exchange->early = turns.at("early");
    exchange->early_keys = turns.at("early_keys");
  }
  return exchange;
}

std::unique_ptr<HeadStages> stages_of(const Fields& given) {
  return std::make_unique<HeadStages>(HeadStages{
      given.at("query"), given.at("key"), given.at("window"), given.number("query_heads"), given.number("widest"),
      given.flag("shared"), given.flag("project"), given.number("ahead") != 0, given.flag("hold")});
}

}  // namespace

Lowering open(nb::handle given, nb::str phase) {
  Lowering low;
  const Fields own(nb::borrow(given), low.buffers), tasks = own.at("tasks"), parts = own.at("parts"),
      schedule = own.at("schedule"), edges = schedule.at("edges"), rows = own.at("rows"), heads = own.at("heads"),
      sets = own.at("sets");
  low.tasks = {tasks.at("exec"), tasks.at("row"), tasks.at("rows"), tasks.at("k"), tasks.at("k0"), tasks.at("k1"),
               tasks.at("dmin"), tasks.at("dmax"), tasks.at("edge"), tasks.at("query_edge"), tasks.at("group")};
  low.parts = {parts.at("task"), parts.at("edge"), parts.at("row"), parts.at("keys")};
  low.stage = own.at("stage");
  low.edges = {edges.at("tile"), edges.at("home"), edges.at("row"), edges.at("rows"),
               edges.at("src"), edges.at("dst"), edges.at("parent"), edges.at("lane")};
  low.schedule = schedule_of(schedule);
  low.rows = rows.at("per_rank");
  low.block_row = rows.at("row");
  low.block_start = rows.at("starts");
  low.home_rows = own.at("home").at("per_rank");
  low.query_sets = heads.at("query");
  low.key_sets = heads.at("key_sets");
  low.shared = heads.at("shared");
  low.queries_move = tasks.flag("queries_move");
  low.keys_overlap = heads.flag("keys_overlap");
  low.whole_results = own.at("whole_results");
  low.groups = {own.at("groups").at("first")};
  low.sets = {sets.at("query"), sets.at("key"), sets.at("query_heads"), sets.at("key_columns")};
  if (own.there("exchange")) {
    const nb::object results = given.attr("exchange").attr("results")(phase);
    low.exchange = exchange_of(own.at("exchange"), nb::cast<int64_t>(results));
  }
  if (sets.there("stages")) low.stages = stages_of(sets.at("stages"));
  if (own.there("beside")) {
    const nb::object beside = given.attr("beside");
    low.beside = std::make_unique<Lowering>(open(beside.attr("alone"), phase));
    low.early = own.at("beside").at("early");
  }
  return low;
}

std::unique_ptr<Network> open_network(nb::handle given) {
  auto network = std::make_unique<Network>();
  const Fields own(nb::borrow(given), network->buffers);
  network->sent = own.at("sent");
  network->first = own.number("first");
  network->ranks_per_node = own.number("ranks_per_node");
  network->nics_per_node = own.number("nics_per_node");
  network->byte_us = own.real("byte_us");
  network->round_us = own.real("round_us");
  network->incast = own.real("incast");
  network->peers = own.real("peers");
  network->one_peer = own.real("one_peer");
  return network;
}

}  // namespace apportion::lower
