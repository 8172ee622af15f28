// Splits rounds in which several NICs send to one into rounds with fewer senders each, if that is faster.
#pragma once

#include "planner/lower/given.hpp"
#include "planner/lower/program.hpp"

namespace apportion::lower {

// Renumbers rounds. Needs no GIL.
void bound_senders(Program& program, const Lowering& low, const Network& network);

}  // namespace apportion::lower
