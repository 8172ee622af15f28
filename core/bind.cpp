#include "bind.hpp"

namespace apportion {

// An area is a submodule; its stub is apportion/_core/NAME.pyi.
static void area(nb::module_& core, const char* name, void (*bind)(nb::module_&)) {
  nb::module_ m = core.def_submodule(name);
  bind(m);
}

NB_MODULE(_core, core) {
  core.attr("checked") = CHECKED;
  area(core, "blend", bind_blend);
  area(core, "blocks", bind_blocks);
  area(core, "bounds", bind_bounds);
  area(core, "cost", bind_cost);
  area(core, "dcp", bind_dcp);
  area(core, "distca", bind_distca);
  area(core, "fusion", bind_fusion);
  area(core, "lone", bind_lone);
  area(core, "grouping", bind_grouping);
  area(core, "hypergraph", bind_hypergraph);
  area(core, "lower", bind_lower);
  area(core, "lpt", bind_lpt);
  area(core, "matching", bind_matching);
  area(core, "messages", bind_messages);
  area(core, "programs", bind_programs);
  area(core, "script", bind_script);
  area(core, "simulate", bind_simulate);
  area(core, "rounds", bind_rounds);
  area(core, "routes", bind_routes);
  area(core, "sorting", bind_sorting);
  area(core, "stages", bind_stages);
  area(core, "sums", bind_sums);
  area(core, "swap", bind_swap);
  area(core, "tables", bind_tables);
  area(core, "tasks", bind_tasks);
  area(core, "totals", bind_totals);
  area(core, "transport", bind_transport);
  area(core, "verify", bind_verify);
  area(core, "zeppelin", bind_zeppelin);
  area(core, "zigzag", bind_zigzag);
}

}  // namespace apportion
