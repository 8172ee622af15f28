#include "planner/lower/given.hpp"

namespace apportion::lower {

namespace {

// Views of the arrays in a Python object's fields.
class Fields {
 public:
  Fields(nb::object object, std::deque<Buffer>& buffers) : object_(std::move(object)), buffers_(buffers) {}

  Fields at(const char* name) const { return {object_.attr(name), buffers_}; }
  bool has(const char* name) const { return !object_.attr(name).is_none(); }
  int64_t number(const char* name) const { return nb::cast<int64_t>(object_.attr(name)); }
  double real(const char* name) const { return nb::cast<double>(object_.attr(name)); }
  bool flag(const char* name) const { return nb::cast<bool>(object_.attr(name)); }
  operator Ints() const { return view<Ints>(); }
  operator IntRows() const { return view<IntRows>(); }
  operator Column<const bool>() const { return view<Column<const bool>>(); }

 private:
  template <class View>
  View view() const {
    View array;
    open_view(array, buffers_.emplace_back(), object_, "an array of the lowering");
    return array;
  }

  nb::object object_;
  std::deque<Buffer>& buffers_;
};

Schedule schedule_of(const Fields& fields) {
  const bool has_back = fields.has("back");
  return {fields.at("round"), fields.at("routed").at("returns_to"), has_back ? Ints(fields.at("back")) : Ints(),
          fields.at("when"), fields.at("channel"), fields.number("buffers"), fields.number("leads"),
          fields.number("tails"), fields.number("levels"), has_back, fields.has("division")};
}

std::unique_ptr<Exchange> exchange_of(const Fields& fields, int64_t results) {
  const Fields pieces = fields.at("pieces"), slots = fields.at("slots");
  auto exchange = std::make_unique<Exchange>(
      Exchange{fields.at("piece"), fields.at("dst"), pieces.at("src"), pieces.at("src_row"), pieces.at("row"),
               pieces.at("rows"), slots.at("round"), fields.at("first"), fields.at("home").at("per_rank"),
               slots.number("rounds"), fields.number("mode"), results, fields.flag("direct"), fields.flag("sums"),
               fields.has("turns"), {}, {}, {}});
  if (exchange->has_turns) {
    const Fields turns = fields.at("turns");
    exchange->late = turns.at("late");
    exchange->early = turns.at("early");
    exchange->early_keys = turns.at("early_keys");
  }
  return exchange;
}

std::unique_ptr<HeadStages> stages_of(const Fields& fields) {
  return std::make_unique<HeadStages>(HeadStages{
      fields.at("query"), fields.at("key"), fields.at("window"), fields.number("query_heads"), fields.number("widest"),
      fields.flag("shared"), fields.flag("project"), fields.number("ahead") != 0, fields.flag("hold")});
}

}  // namespace

Lowering open(nb::handle object, nb::str phase) {
  Lowering low;
  const Fields fields(nb::borrow(object), low.buffers), tasks = fields.at("tasks"), parts = fields.at("parts"),
      schedule = fields.at("schedule"), edges = schedule.at("edges"), rows = fields.at("rows"), heads = fields.at("heads"),
      sets = fields.at("sets");
  low.tasks = {tasks.at("exec"), tasks.at("row"), tasks.at("rows"), tasks.at("k"), tasks.at("k0"), tasks.at("k1"),
               tasks.at("dmin"), tasks.at("dmax"), tasks.at("edge"), tasks.at("query_edge"), tasks.at("group")};
  low.parts = {parts.at("task"), parts.at("edge"), parts.at("row"), parts.at("keys")};
  low.stage = fields.at("stage");
  low.edges = {edges.at("tile"), edges.at("home"), edges.at("row"), edges.at("rows"),
               edges.at("src"), edges.at("dst"), edges.at("parent"), edges.at("lane")};
  low.schedule = schedule_of(schedule);
  low.rows = rows.at("per_rank");
  low.block_row = rows.at("row");
  low.block_start = rows.at("starts");
  low.home_rows = fields.at("home").at("per_rank");
  low.query_sets = heads.at("query");
  low.key_sets = heads.at("key_sets");
  low.shared = heads.at("shared");
  low.queries_move = tasks.flag("queries_move");
  low.keys_overlap = heads.flag("keys_overlap");
  low.whole_results = fields.at("whole_results");
  low.groups = {fields.at("groups").at("first")};
  low.sets = {sets.at("query"), sets.at("key"), sets.at("query_heads"), sets.at("key_columns")};
  if (fields.has("exchange")) {
    const nb::object results = object.attr("exchange").attr("results")(phase);
    low.exchange = exchange_of(fields.at("exchange"), nb::cast<int64_t>(results));
  }
  if (sets.has("stages")) low.stages = stages_of(sets.at("stages"));
  if (fields.has("beside")) {
    const nb::object beside = object.attr("beside");
    low.beside = std::make_unique<Lowering>(open(beside.attr("alone"), phase));
    low.early = fields.at("beside").at("early");
  }
  return low;
}

std::unique_ptr<Network> open_network(nb::handle object) {
  auto network = std::make_unique<Network>();
  const Fields fields(nb::borrow(object), network->buffers);
  network->sent = fields.at("sent");
  network->first = fields.number("first");
  network->ranks_per_node = fields.number("ranks_per_node");
  network->nics_per_node = fields.number("nics_per_node");
  network->byte_us = fields.real("byte_us");
  network->round_us = fields.real("round_us");
  network->incast = fields.real("incast");
  network->peers = fields.real("peers");
  network->one_peer = fields.real("one_peer");
  return network;
}

}  // namespace apportion::lower
