// The areas of the extension: each is a submodule, and a function of the file that has its loops.
#pragma once

#include "numpy.hpp"

namespace apportion {

void bind_blend(nb::module_& m);
void bind_blocks(nb::module_& m);
void bind_bounds(nb::module_& m);
void bind_cost(nb::module_& m);
void bind_dcp(nb::module_& m);
void bind_distca(nb::module_& m);
void bind_fusion(nb::module_& m);
void bind_lone(nb::module_& m);
void bind_grouping(nb::module_& m);
void bind_hypergraph(nb::module_& m);
void bind_lower(nb::module_& m);
void bind_lpt(nb::module_& m);
void bind_matching(nb::module_& m);
void bind_messages(nb::module_& m);
void bind_programs(nb::module_& m);
void bind_script(nb::module_& m);
void bind_simulate(nb::module_& m);
void bind_rounds(nb::module_& m);
void bind_routes(nb::module_& m);
void bind_sorting(nb::module_& m);
void bind_stages(nb::module_& m);
void bind_sums(nb::module_& m);
void bind_swap(nb::module_& m);
void bind_tables(nb::module_& m);
void bind_tasks(nb::module_& m);
void bind_totals(nb::module_& m);
void bind_transport(nb::module_& m);
void bind_verify(nb::module_& m);
void bind_zeppelin(nb::module_& m);
void bind_zigzag(nb::module_& m);

}  // namespace apportion
