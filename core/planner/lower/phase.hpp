// Builds the programs of all ranks for one phase from a `Lowering`.
#pragma once

#include <array>
#include <span>

#include "planner/lower/core.hpp"
#include "planner/lower/exchange.hpp"

namespace apportion::lower {

// Adds an op on all home rows of each rank. NONE: no such operand.
void add_whole(Program& program, const Lowering& low, int64_t step, Tensor a, Tensor b, Tensor c);

// The tensors fetched for tasks: those of queries, then those of keys.
std::span<const Tensor> fetched(bool backward);

// Replicates the program of groups for each member, with the member's heads; members communicate with their
// counterparts in other groups.
void spread(Program& program, const Lowering& low);

Program lower_phase(const Lowering& low, bool backward);
Program lower_stages(const Lowering& low, bool backward);  // for heads in stages

}  // namespace apportion::lower
