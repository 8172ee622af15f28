// The exchange between the caller's home rows and the rows of attention.
//
// A copy of a piece goes to every rank of the piece's group, with the heads of that rank: as a transfer, or as a local
// copy if the rank is its home. The return is the reverse; if several ranks of a group use one KV head, its gradients
// are summed at home.
#include "planner/lower/phase.hpp"

namespace apportion::lower {

namespace {

// The ends of an incoming copy, with the heads of its destination rank.
Ends ends_of(const Lowering& low, const Copy& copy, Tensor tensor) {
  const int64_t heads = (KV_SIDE.has(tensor) ? low.sets.key : low.sets.query)[copy.dst];
  return {copy.src, copy.dst, rows_of(tensor, Space::HOME, copy.home_row, copy.rows, heads),
          rows_of(tensor, Space::WORK, copy.row, copy.rows, heads)};
}

// The launch of each copy between ranks. first: that of the first round.
auto launches_of(const ExchangeSteps& steps, int64_t first, Column<const bool> apart) {
  return [&steps, first, apart](const Copy& copy, int64_t round) {
    return apart.size() != 0 && apart[copy.piece] ? steps.other : steps.launches[first + round];
  };
}

}  // namespace

int64_t launch_other(Program& program, const Lowering& low, int64_t results) {
  if (!low.exchange || !low.exchange->turns) return -1;
  // on a separate channel, after the channels of rounds that fetch and of rounds that return
  return program.launch(2 * low.schedule.channels(), low.exchange->mode | results);
}

ExchangeSteps append_exchange(Program& program, const Lowering& low, Way way, Op attend, int64_t results, int64_t parts,
                              int64_t launched) {
  ExchangeSteps steps{{}, program.step(Op::CLEAR), 0, 0, 0, launched};
  for (int64_t i = 0; i < parts * low.exchange->rounds; ++i)
    steps.launches.push_back(program.launch(CHANNEL, low.exchange->mode | results));
  steps.copy = program.step(results != 0 ? Op::DELIVER : Op::COPY);
  steps.attend = program.step(attend);
  for (const int64_t launch : steps.launches) program.wait(launch);
  if (way == Way::IN) steps.other = launch_other(program, low, 0);
  if (launched >= 0) program.wait(launched);
  steps.add = program.step(Op::ADD);
  return steps;
}

void move(Program& program, const Lowering& low, const ExchangeSteps& steps, Tensor tensor, Way way,
          Column<const bool> apart, int64_t part) {
  const auto launch = launches_of(steps, part * low.exchange->rounds, apart);
  const auto ends = [&](int64_t, const Copy& copy) {
    const Ends inward = ends_of(low, copy, tensor);
    return way == Way::IN ? inward : Ends{copy.dst, copy.src, inward.into, inward.out};
  };
  move_copies(program, *low.exchange, steps.copy, launch, ends);
}

void return_kv_gradients(Program& program, const Lowering& low, const ExchangeSteps& steps, Column<const bool> apart) {
  constexpr Tensor DKV = Tensor::DKV;
  const Exchange& exchange = *low.exchange;
  if (!exchange.shared) return move(program, low, steps, DKV, Way::OUT, apart);
  Growing<int64_t> next_row = reach_of(program, DKV, low.groups.ranks()), staged;  // by rank; by arriving copy
  const Growing<int64_t> group = low.groups.of_ranks();
  for (int64_t rank = 0; rank < next_row.count(); ++rank) next_row[rank] = std::max(next_row[rank], low.rows[group[rank]]);
  for (int64_t rank = 0; rank < exchange.held.size(); ++rank)
    if (const int64_t rows = exchange.held[rank]; rows > 0)
      program.clear(steps.clear, rank, rows_of(DKV, Space::HOME, exchange.first[rank], rows));
  const auto arriving = [&](const Copy& copy, int64_t row) {
    return rows_of(DKV, Space::WORK, row, copy.rows, low.sets.key[copy.dst]);
  };
  const auto launch = launches_of(steps, 0, apart);
  exchange.moved([&](int64_t, const Copy& copy, int64_t round) {
    staged.push_back(next_row[copy.src]);
    next_row[copy.src] += copy.rows;
    program.send(launch(copy, round), copy.dst, copy.src, ends_of(low, copy, DKV).into);
  });
  int64_t number = 0;
  exchange.moved([&](int64_t, const Copy& copy, int64_t round) {
    program.receive(launch(copy, round), copy.dst, copy.src, arriving(copy, staged[number++]));
  });
  exchange.kept([&](int64_t, const Copy& copy) {
    const Ends ends = ends_of(low, copy, DKV);
    program.combine(steps.add, copy.src, ends.into, ends.out);
  });
  number = 0;
  exchange.moved([&](int64_t, const Copy& copy, int64_t) {
    program.combine(steps.add, copy.src, arriving(copy, staged[number++]), ends_of(low, copy, DKV).out);
  });
}

Growing<int64_t> reach_of(const Program& program, Tensor tensor, int64_t ranks) {
  Growing<int64_t> reach(ranks);
  each_operand(program, [&](int32_t rank, const Operand& operand) {
    if (operand.tensor() == tensor) reach[rank] = std::max(reach[rank], operand.reach());
  });
  return reach;
}

}  // namespace apportion::lower
