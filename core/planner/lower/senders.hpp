// Rounds in which several NICs send to one, as several rounds with fewer senders each, where that is faster.
#pragma once

#include "planner/lower/given.hpp"
#include "planner/lower/program.hpp"

namespace apportion::lower {

// Rounds are numbered anew. Needs no GIL.
void bound_senders(Program& program, const Lowering& low, const Network& network);

}  // namespace apportion::lower
