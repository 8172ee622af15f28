// From a `Lowering` to the programs of all ranks for one phase.
#pragma once

#include <array>
#include <span>

#include "planner/lower/core.hpp"
#include "planner/lower/exchange.hpp"

namespace apportion::lower {

// An op on all home rows of each rank. NONE: no such operand.
void add_whole(Program& program, const Lowering& low, int64_t step, Tensor a, Tensor b, Tensor c);

// What goes to where tasks run: of queries, then of keys.
std::span<const Tensor> fetched(bool backward);

// What groups do, done by each of their members, with its heads; members talk to those at their place in other groups.
void spread(Program& program, const Lowering& low);

Program lower_phase(const Lowering& low, bool backward);
Program lower_stages(const Lowering& low, bool backward);  // where heads take turns

}  // namespace apportion::lower
