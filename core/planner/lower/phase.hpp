// Builds the programs of all ranks for one phase from a `Lowering`; the exchange around attention.
#pragma once

#include "planner/lower/core.hpp"

namespace apportion::lower {

inline constexpr int64_t CHANNEL = 0;

// The steps of one direction. launches: one per part of the tensors and round; attend: the step of the concurrent
// computation; other: the launch of separate pieces; -1 if all rows go at once.
struct ExchangeSteps {
  Growing<int64_t> launches;
  int64_t clear, copy, attend, add, other;
};

// Appends the launch of separate pieces; returns its position, or -1 if there are none.
int64_t launch_other(Program& program, const Lowering& low, int64_t results);

enum class Way { IN, OUT };

// Appends the steps of an exchange, with separate rounds for each part of the tensors. results: mode bits. Separate
// pieces that come in are launched after the rest, since both share the links; the caller appends the wait for them.
// launched: position of the launch of separate pieces, for which this exchange waits, or -1.
ExchangeSteps append_exchange(Program& program, const Lowering& low, Way way, Op attend, int64_t results, int64_t parts,
                              int64_t launched = -1);

// The source and destination ranks of rows, and the operands on each.
struct Ends {
  int64_t src, dst;
  Operand out, into;
};

// Adds all copies: transfers between ranks, at launch(copy, round), and local copies at step `copy` unless it is -1.
// ends(number, copy): source and destination of each.
template <class Launch, class EndsOf>
void move_copies(Program& program, const Exchange& exchange, int64_t copy, Launch&& launch, EndsOf&& ends) {
  exchange.moved([&](int64_t number, const Copy& item, int64_t round) {
    const Ends route = ends(number, item);
    program.send(launch(item, round), route.src, route.dst, route.out);
  });
  exchange.moved([&](int64_t number, const Copy& item, int64_t round) {
    const Ends route = ends(number, item);
    program.receive(launch(item, round), route.src, route.dst, route.into);
  });
  if (copy < 0) return;
  exchange.kept([&](int64_t number, const Copy& item) {
    const Ends route = ends(number, item);
    program.combine(copy, route.src, route.out, route.into, 1);
  });
}

// Moves rows of a tensor from home rows to attention rows or back, in one part of the rounds. apart: which pieces are
// sent separately, if any.
void move(Program& program, const Lowering& low, const ExchangeSteps& steps, Tensor tensor, Way way,
          Column<const bool> apart, int64_t part = 0);

// Returns gradients of KV rows, and sums those that ranks of a group have for one head. `program` must already have
// all rows of attention.
void return_kv_gradients(Program& program, const Lowering& low, const ExchangeSteps& steps, Column<const bool> apart);

// For each rank, the end of the work rows of a tensor that the program's rows name.
Growing<int64_t> reach_of(const Program& program, Tensor tensor, int64_t ranks);

// Adds an op on all home rows of each rank. NONE: no such operand.
void add_whole(Program& program, const Lowering& low, int64_t step, Tensor a, Tensor b, Tensor c,
               Tensor d = Tensor::NONE);

// The tensors fetched for tasks: those of queries, then those of keys.
std::span<const Tensor> fetched(bool backward);

// Replicates the program of groups for each member, with the member's heads; members communicate with their
// counterparts in other groups.
void spread(Program& program, const Lowering& low);

Program lower_phase(const Lowering& low, bool backward);
Program lower_stages(const Lowering& low, bool backward);  // for heads in stages

}  // namespace apportion::lower
