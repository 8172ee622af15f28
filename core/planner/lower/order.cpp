// The order of a program's steps: when rounds start, when they are waited for, and what is computed in between.
//
//   forward    start, ..                | local tasks | wait, start ready   | tasks of that round | start | ..
//   backward   the same; after each stage also start the returns whose rows are complete, wait for returns of earlier
//              stages, and add them. Forward does this for results if queries leave home
//
// Rows that only the tasks of one tile compute go home as results, in separate rounds, and nothing is added to them.
//
// A round may start once the rounds that bring its relays have arrived and the buffers allow it. All ranks share the
// order, so rounds ascend on every rank.
#include "planner/lower/core.hpp"

#include <set>

namespace apportion::lower {

namespace {

// Returns the distinct keys in ascending order; sets the batch of each edge that has a key (not -1).
Growing<int64_t> numbered(const Growing<int64_t>& keys, Growing<int32_t>& batch) {
  Growing<int64_t> distinct;
  for (const int64_t key : keys)
    if (key >= 0) distinct.push_back(key);
  std::sort(distinct.begin(), distinct.end());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
  batch = Growing<int32_t>(keys.count(), -1);
  for (int64_t edge = 0; edge < keys.count(); ++edge)
    if (keys[edge] >= 0) batch[edge] = narrow(std::lower_bound(distinct.begin(), distinct.end(), keys[edge]) - distinct.begin());
  return distinct;
}

// Finds the batches in which sums return: those of queries, and in backward also those of keys.
void find_batches(const Lowering& low, const Sides& sides, bool backward, Order& order) {
  const Schedule& schedule = low.schedule;
  const int64_t edges = low.edges.size(), rounds = schedule.rounds(), channels = schedule.channels();
  Growing<int64_t> keys(edges, -1);
  if (low.later()) {
    for (const Side* side : {&sides.queries, &sides.keys}) {
      if (!backward && side == &sides.keys) continue;
      for (const Tile& tile : side->tiles) keys[tile.index] = 2 * (int64_t{tile.back} * rounds + tile.round);
    }
    for (int64_t tile = 0; tile < low.whole_results.size(); ++tile)
      keys[sides.queries.tiles[tile].index] += low.whole_results[tile];
    for (const int64_t key : numbered(keys, order.batch)) {
      const int64_t round = (key >> 1) % rounds;
      order.batches.push_back({round, (key >> 1) / rounds, channels + schedule.channel[round], (key & 1) != 0});
    }
  } else if (backward && schedule.back) {  // tiles of one round return together if they use the same channel
    const Ints back = *schedule.back;
    int64_t backs = 1;
    for (int64_t edge = 0; edge < edges; ++edge) backs = std::max(backs, back[edge] + 1);
    for (int64_t edge = 0; edge < edges; ++edge) keys[edge] = backs * schedule.round[edge] + back[edge];
    for (const int64_t key : numbered(keys, order.batch))
      order.batches.push_back({key / backs, key / backs, channels + key % backs, false});
  } else {
    order.batch = Growing<int32_t>(edges, -1);
    if (!backward) return;
    for (int64_t edge = 0; edge < edges; ++edge) order.batch[edge] = narrow(schedule.round[edge]);
    for (int64_t round = 0; round < rounds; ++round)
      order.batches.push_back({round, round, channels + schedule.channel[round], false});
  }
}

class Fetching {
 public:
  Fetching(Program& program, const Schedule& schedule, const Edges& edges, Order& order)
      : program_(program), schedule_(schedule), order_(order), after_(schedule.rounds(), -1) {
    order.launch = order.wait = Growing<int64_t>(schedule.rounds(), -1);
    for (int64_t edge = 0; edge < edges.size(); ++edge) {
      const int64_t parent = edges.parent[edge], round = schedule.round[edge];
      if (parent >= 0) after_[round] = std::max(after_[round], schedule.round[parent]);
    }
    for (int64_t round = 0; round < schedule.rounds(); ++round) waiting_.push_back(round);
    start(0, 0);
  }
  // Launches every round that may start once `arrived` rounds have arrived and the first `used` are consumed.
  void start(int64_t arrived, int64_t used) {
    Growing<int64_t> waiting;
    bool full = false;
    for (const int64_t round : waiting_) {
      full = full || (used < schedule_.rounds() && schedule_.when[round] >= schedule_.when[used] + schedule_.buffers);
      if (!full && after_[round] < arrived)
        order_.launch[round] = program_.launch(schedule_.channel[round]);
      else
        waiting.push_back(round);
    }
    waiting_ = std::move(waiting);
  }
  void take(int64_t round) {
    order_.wait[round] = program_.wait(order_.launch[round]);
    start(round + 1, round);
  }
  void compute(Op op) { order_.stage.push_back(program_.step(op)); }

 private:
  Program& program_;
  const Schedule& schedule_;
  Order& order_;
  Growing<int64_t> after_;  // for each round, the last one that must have arrived before it starts
  Growing<int64_t> waiting_;
};

class Returning {
 public:
  Returning(Program& program, const Lowering& low, Op combine, Order& order)
      : program_(program), combine_(combine), order_(order), needs_(order.batches.count()),
        opened_(order.batches.count(), -1) {
    order.clear = Growing<int64_t>(low.schedule.rounds(), -1);
    for (int64_t batch = 0; batch < order.batches.count(); ++batch) waiting_.push_back(batch);
    for (int64_t edge = 0; edge < order.batch.count(); ++edge) {
      const int64_t to = low.schedule.returns_to[edge], earlier = order.batch[edge];
      if (to < 0 || earlier < 0) continue;
      needs_[order.batch[to]].insert(earlier);
      opened_[earlier] = std::max(opened_[earlier], order.batches[order.batch[to]].round);
    }
  }
  // Clears the sums of the round's tiles.
  void open(int64_t round) {
    if (!order_.batches.empty()) order_.clear[round] = program_.step(Op::CLEAR);
  }
  // Launches the batches that are complete after the first `computed` rounds and to which all batches that their sums
  // include have been added.
  void start(int64_t computed) {
    Growing<int64_t> waiting;
    for (const int64_t number : waiting_) {
      Batch& batch = order_.batches[number];
      const auto added = [&](int64_t need) { return order_.batches[need].add >= 0; };
      if (batch.complete < computed && std::all_of(needs_[number].begin(), needs_[number].end(), added)) {
        batch.launch = program_.launch(batch.channel, batch.results ? RESULTS : 0);
        under_way_.insert({number, computed});
      } else {
        waiting.push_back(number);
      }
    }
    waiting_ = std::move(waiting);
  }
  // Waits for batches that started by stage `started`, and adds them, if their target rows are open.
  void take(int64_t started, int64_t computed) {
    for (auto at = under_way_.begin(); at != under_way_.end();) {
      const auto [number, stage] = *at;
      if (stage > started || opened_[number] >= computed) {
        ++at;
        continue;
      }
      Batch& batch = order_.batches[number];
      batch.wait = program_.wait(batch.launch);
      batch.add = batch.results ? batch.wait : program_.step(combine_);
      at = under_way_.erase(at);
    }
  }
  bool under_way() const { return !under_way_.empty(); }

 private:
  Program& program_;
  Op combine_;
  Order& order_;
  Growing<std::set<int64_t>> needs_;  // for each batch, the batches that its sums include
  Growing<int64_t> opened_;           // for each batch, the last round that opens rows to which it is added
  Growing<int64_t> waiting_;
  std::set<std::pair<int64_t, int64_t>> under_way_;  // batches, and the stage in which their return started
};

}  // namespace

// Waits for returns some stages after they start; otherwise every rank would wait for the slowest at every stage. The
// delay is one stage fewer than there are buffers, but at least one, plus one for each level of relays; around an inner
// ring relays add none, since the next rank waits for each return.
Order append_steps(Program& program, const Lowering& low, const Sides& sides, bool backward, const Callbacks& between) {
  const Schedule& schedule = low.schedule;
  const Op compute = backward ? Op::ATTEND_GRAD : Op::ATTEND;
  const int64_t rounds = schedule.rounds(), levels = schedule.back ? 0 : schedule.channels() - 1;
  const int64_t behind = std::max<int64_t>(1, schedule.buffers - 1) + levels;
  Order order;
  find_batches(low, sides, backward, order);
  Fetching fetching(program, schedule, low.edges, order);
  Returning returning(program, low, backward ? Op::ADD : Op::MERGE, order);
  fetching.compute(compute);
  between.first();
  for (int64_t lead = 1; lead < schedule.leads; ++lead) fetching.compute(compute);
  for (int64_t round = 0; round < rounds; ++round) {
    fetching.take(round);
    returning.open(round);
    fetching.compute(compute);
    returning.start(round + 1);
    fetching.start(round + 1, round + 1);
    returning.take(round + 1 - behind, round + 1);
    returning.start(round + 1);
  }
  const auto finish = [&] {
    returning.take(rounds, rounds);
    returning.start(rounds);
  };
  for (int64_t left = schedule.tails; left > 0; --left) {
    if (left == 1) between.last();
    fetching.compute(compute);
    if (left <= schedule.levels) finish();
  }
  while (returning.under_way()) finish();
  return order;
}

}  // namespace apportion::lower
