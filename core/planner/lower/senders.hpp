// Splits rounds in which several NICs send to the same one into rounds with fewer senders, if that is faster.
#pragma once

#include "planner/lower/given.hpp"
#include "planner/lower/program.hpp"

namespace apportion::lower {

// Splits rounds and renumbers them. Needs no GIL.
void bound_senders(Program& program, const Lowering& low, const Network& network);

}  // namespace apportion::lower
