// The programs of all ranks for one kind and phase:
//
//   forward    [in]         attention of groups                  [out]  finish
//   backward   delta  [in]  attention of groups                  [out]
//
// The exchange around attention is optional. Attention is lowered for groups of ranks and then spread over the members
// of each group.
#include "planner/lower/phase.hpp"

namespace apportion::lower {

namespace {

// Adds the tasks of lone sequences, on single ranks, during the incoming or outgoing exchange.
void add_beside(Program& program, const Lowering& low, const ExchangeSteps& incoming, const ExchangeSteps& outgoing,
                bool backward) {
  const Lowering& alone = low.beside->alone;
  const Sides sides = sides_of(alone, backward);
  clear_unopened(program, incoming.clear, sides, Space::HOME, backward);
  Growing<int64_t> steps(alone.tasks.size());
  for (int64_t task = 0; task < steps.count(); ++task) steps[task] = low.beside->early[task] ? incoming.attend : outgoing.attend;
  attend(program, alone, sides, steps, Space::HOME, backward);
}

// Moves all tensors that tasks need, and their sums. Some queries may arrive late, some results leave early (`Turns`).
void exchange_rows(Program& program, const Lowering& low, const ExchangeSteps& incoming, const ExchangeSteps& outgoing,
                   bool backward) {
  const Exchange& exchange = *low.exchange;
  const Turns turns = exchange.turns ? *exchange.turns : Turns();
  int64_t part = 0;
  for (const Tensor tensor : fetched(backward)) {
    const Column<const bool> apart = KV_SIDE.has(tensor) ? Column<const bool>() : turns.late;
    move(program, low, incoming, tensor, Way::IN, apart, exchange.direct ? part++ : 0);
  }
  move(program, low, outgoing, sums_of_queries(backward), Way::OUT, turns.early);
  if (backward) return_kv_gradients(program, low, outgoing, turns.early_keys);
}

}  // namespace

void add_whole(Program& program, const Lowering& low, int64_t step, Tensor a, Tensor b, Tensor c, Tensor d) {
  for (int64_t rank = 0; rank < low.home_rows.size(); ++rank) {
    if (low.home_rows[rank] == 0) continue;
    const auto whole = [&](Tensor tensor) {
      return tensor == Tensor::NONE ? Operand() : rows_of(tensor, Space::HOME, 0, low.home_rows[rank]);
    };
    program.rowops.push_back({narrow(rank), narrow(step), whole(a), whole(b), whole(c), whole(d), d != Tensor::NONE});
  }
}

std::span<const Tensor> fetched(bool backward) {
  static constexpr std::array FORWARD{Tensor::Q, Tensor::KV};
  static constexpr std::array BACKWARD{Tensor::Q, Tensor::DO, Tensor::DELTA, Tensor::KV};
  return backward ? std::span<const Tensor>(BACKWARD) : std::span<const Tensor>(FORWARD);
}

void spread(Program& program, const Lowering& low) {
  const Ints first = low.groups.first;
  Program spread_program;
  spread_program.steps = std::move(program.steps);
  spread_program.rounds = program.rounds;
  const auto members = [&](const auto& rows, auto& out, auto&& change) {
    for (auto row : rows) {
      const int64_t group = row.rank;
      for (int64_t rank = first[group]; rank < first[group + 1]; ++rank) {
        row.rank = narrow(rank);
        out.push_back(row);
        change(out.back(), rank - first[group]);
      }
    }
  };
  const auto same = [](const auto&, int64_t) {};
  members(program.transfers, spread_program.transfers, [&](Transfer& row, int64_t member) {
    row.peer = narrow(first[row.peer] + member);
  });
  members(program.attention, spread_program.attention, same);
  members(program.rowops, spread_program.rowops, same);
  each_operand(spread_program, [&](int32_t rank, Operand& operand) {
    if (!operand.none()) operand = operand.with((KV_SIDE.has(operand.tensor()) ? low.sets.key : low.sets.query)[rank]);
  });
  program = std::move(spread_program);
}

Program lower_phase(const Lowering& low, bool backward) {
  if (low.exchange && low.stages) return lower_stages(low, backward);
  const Op compute = backward ? Op::ATTEND_GRAD : Op::ATTEND;
  Program program;
  const int64_t delta = backward ? program.step(Op::DELTA) : -1;
  ExchangeSteps incoming, outgoing;
  int64_t results = 0, early = -1;
  if (low.exchange) {
    results = low.exchange->results(backward);
    const int64_t parts = low.exchange->direct ? std::ssize(fetched(backward)) : 1;
    incoming = append_exchange(program, low, Way::IN, compute, 0, parts);
  }
  Callbacks between;
  if (low.exchange && low.exchange->turns) {
    between.first = [&] { program.wait(incoming.other); };
    between.last = [&] { early = launch_other(program, low, results); };
  }
  lower_core(program, low, backward, between);
  if (low.exchange) outgoing = append_exchange(program, low, Way::OUT, compute, results, 1, early);
  const int64_t finish = backward ? -1 : program.step(Op::FINISH);
  if (low.groups.split()) spread(program, low);
  if (low.exchange) {
    exchange_rows(program, low, incoming, outgoing, backward);
    if (low.beside) add_beside(program, low, incoming, outgoing, backward);
  }
  if (backward)
    add_whole(program, low, delta, Tensor::DO, Tensor::O, Tensor::DELTA);  // O has no other use
  else
    add_whole(program, low, finish, Tensor::NONE, Tensor::NONE, Tensor::O);
  return program;
}

}  // namespace apportion::lower
