// The programs of head stages: one lowering of a group's attention, placed once per stage, and the exchanges around it.
//
//   forward    in 0 | attend 0 | out 0, in 1 | attend 1 | out 1, in 2 | ..  | finish
//   backward   delta | in 0 | grads 0 | out 0, in 1 | grads 1 | ..  | project_grad
//
// Rows are as in Ulysses: work rows in attention order hold the heads of one stage, then those of the next (UPipe,
// section 3.3). KV rows stay for the stages of their window, and so do their gradients, which leave after its last
// stage. With `ahead`, two arenas alternate: a stage arrives while the previous one is computed. With `hold`, KV tiles
// of other groups also stay for the stages of a window; otherwise every stage brings its own, like ring attention for
// its heads.
//
// If the program projects, a home rank computes the heads of each rank of the group in work rows after the attention
// rows, and sends them from there; its own heads, and shared KV heads, are computed in place. Gradients go home as
// results; those of shared KV heads are summed there. Finally, all heads go back through the projection at once.
#include <map>

#include "planner/lower/phase.hpp"

namespace apportion::lower {

namespace {

// The positions of the steps of one stage.
struct Stage {
  int64_t project, copy, attend, deliver, add;
  Growing<int64_t> inbound, outbound, sums;  // launches of rounds; sums: for gradients of KV heads that ranks share
};

// How stages use one side of the core. sets: the heads by stage and rank; turn: which of the `turns` arenas of
// attention rows each stage uses.
struct View {
  IntRows sets;
  Growing<int64_t> row, turn;  // row: each stage's row of `sets`
  int64_t turns;
};

class Stages {
 public:
  Stages(const Lowering& low, bool backward)
      : low_(low), exchange_(*low.exchange), stages_(*low.stages), backward_(backward), group_(low.groups.of_ranks()) {
    for (int64_t stage = 0; stage < stages_.count(); ++stage) {
      if (stages_.opens(stage)) opens_.push_back(stage);
      if (stages_.closes(stage)) closes_.push_back(stage);
    }
    lower_core(core_, low, backward);
    spread(core_, low);
    find_views();
    find_owners();
    make_rows();
  }

  Program run() {
    if (backward_) add_whole(program_, low_, program_.step(Op::DELTA), Tensor::DO, Tensor::O, Tensor::DELTA);
    if (backward_ && stages_.shared)
      add_whole(program_, low_, program_.step(Op::CLEAR), Tensor::NONE, Tensor::NONE, Tensor::DKV);
    append_stages();
    if (!backward_) add_whole(program_, low_, program_.step(Op::FINISH), Tensor::NONE, Tensor::NONE, Tensor::O);
    if (backward_ && stages_.project)  // gradients of all heads at home into gradients of X
      add_whole(program_, low_, program_.step(Op::PROJECT_GRAD), Tensor::X, Tensor::DQ, Tensor::DKV, Tensor::DX);
    for (const Tensor tensor : fetched(backward_)) move(tensor, Way::IN);
    move(sums_of_queries(backward_), Way::OUT);
    if (backward_) move(Tensor::DKV, Way::OUT);
    for (int64_t stage = 0; stage < stages_.count(); ++stage) attend(stage);
    if (stages_.project) project();
    if (has_own_rows(Tensor::DKV)) gather();
    return std::move(program_);
  }

 private:
  // steps

  // With `ahead`, the next stage arrives and the previous one leaves while a stage is computed.
  void append_stages() {
    const int64_t count = stages_.count();
    for (const Step& step : core_.steps) channel_ = std::max(channel_, step.channel + 1);
    if (!stages_.ahead) channel_ = CHANNEL;  // with `ahead`, tiles are in flight at the same time
    steps_ = Growing<Stage>(count);
    bring(0);
    for (int64_t stage = 0; stage < count; ++stage) {
      const bool more = stage + 1 < count;
      wait(steps_[stage].inbound);
      if (stages_.ahead && more) bring(stage + 1);
      steps_[stage].attend = program_.append(core_);
      if (stages_.ahead && stage > 0) close(stage - 1);
      steps_[stage].outbound = launch(RESULTS);
      if (has_own_rows(Tensor::DKV) && stages_.closes(stage)) steps_[stage].sums = launch(0);
      steps_[stage].deliver = program_.step(Op::DELIVER);
      if (!stages_.ahead && more) bring(stage + 1);
      if (!stages_.ahead || !more) close(stage);
    }
  }
  void bring(int64_t stage) {
    steps_[stage].project = program_.step(Op::PROJECT);
    steps_[stage].inbound = launch(0);
    steps_[stage].copy = program_.step(Op::COPY);
  }
  void close(int64_t stage) {
    wait(steps_[stage].outbound);
    wait(steps_[stage].sums);
    steps_[stage].add = program_.step(Op::ADD);
  }
  Growing<int64_t> launch(int64_t results) {
    Growing<int64_t> launches;
    for (int64_t round = 0; round < exchange_.rounds; ++round)
      launches.push_back(program_.launch(channel_, exchange_.mode | results));
    return launches;
  }
  void wait(const Growing<int64_t>& launches) {
    for (const int64_t launch : launches) program_.wait(launch);
  }

  // rows

  int64_t kept(int64_t rank) const { return low_.kept(group_[rank]); }
  int64_t member(int64_t rank) const { return rank - low_.groups.first[group_[rank]]; }
  const View& view(Tensor tensor) const { return KV_SIDE.has(tensor) ? keys_ : queries_; }

  void find_views() {
    const int64_t turns = 1 + (stages_.ahead != 0), count = stages_.count(), windows = stages_.key.rows();
    queries_ = {stages_.query, {}, {}, std::min(turns, count)};
    keys_ = {stages_.key, {}, {}, std::min(turns, windows)};
    for (int64_t stage = 0; stage < count; ++stage) {
      const int64_t window = stages_.window[stage];
      queries_.row.push_back(stage);
      queries_.turn.push_back(stage % queries_.turns);
      keys_.row.push_back(window_like(window));
      keys_.turn.push_back(window % keys_.turns);
    }
  }
  // The first window with the same KV heads on every rank, among those with the same turn.
  int64_t window_like(int64_t window) const {
    for (int64_t first = window % keys_.turns;; first += keys_.turns) {
      bool same = true;
      for (int64_t place = 0; place < stages_.key.columns(); ++place)
        same = same && stages_.key[first][place] == stages_.key[window][place];
      if (same) return first;
    }
  }

  // The operand in one stage, on one rank, for an operand of the core. Tiles follow the attention rows of all turns.
  Operand at_stage(int64_t stage, int64_t rank, const Operand& operand) const {
    if (operand.none()) return operand;
    const View& source = view(operand.tensor());
    const int64_t turn = operand.row() < kept(rank) ? source.turn[stage] : source.turns - 1;
    return rows_of(operand.tensor(), Space::WORK, operand.row() + turn * kept(rank), operand.rows(),
                   source.sets[source.row[stage]][member(rank)]);
  }

  // How often rows of a tensor arrive (queries in every stage, keys once per window), and the stages of the `at`-th
  // arrival.
  int64_t times(Tensor tensor) const { return KV_SIDE.has(tensor) ? opens_.count() : stages_.count(); }
  int64_t first_stage(Tensor tensor, int64_t at) const { return KV_SIDE.has(tensor) ? opens_[at] : at; }
  int64_t last_stage(Tensor tensor, int64_t at) const { return KV_SIDE.has(tensor) ? closes_[at] : at; }
  int64_t heads(Tensor tensor, int64_t at, const Copy& copy) const { return view(tensor).sets[at][member(copy.dst)]; }

  // Finds, for each window and copy, the owner, whose rows at home serve all copies of the same piece and heads: the
  // one that stays at home, else the first.
  void find_owners() {
    for (int64_t window = 0; window < stages_.key.rows(); ++window) {
      std::map<std::pair<int64_t, int64_t>, int64_t> owners;
      Growing<int64_t> owner(exchange_.size());
      for (int64_t at = 0; at < exchange_.size(); ++at) {
        const Copy copy = exchange_[at];
        const auto entry = owners.insert({{copy.piece, heads(Tensor::KV, window, copy)}, at}).first;
        if (!copy.moves()) entry->second = at;
      }
      for (int64_t at = 0; at < exchange_.size(); ++at) {
        const Copy copy = exchange_[at];
        owner[at] = owners[{copy.piece, heads(Tensor::KV, window, copy)}];
      }
      owner_.push_back(std::move(owner));
    }
  }

  // Makes work rows at home for projected rows and for sums, for the copies that need them in any stage; -1 for others.
  void make_rows() {
    Growing<Tensor> tensors;
    if (stages_.project) tensors.push_back(Tensor::Q), tensors.push_back(Tensor::KV);
    if (backward_ && stages_.shared) tensors.push_back(Tensor::DKV);
    for (const Tensor tensor : tensors) {
      const Growing<int64_t> reach = reach_of(core_, tensor, group_.count());
      for (int64_t at = 0; at < times(tensor); ++at) {
        Growing<int64_t> row(exchange_.size(), -1), next = reach;
        for (int64_t rank = 0; rank < next.count(); ++rank)
          next[rank] = std::max(next[rank], kept(rank)) + (view(tensor).turns - 1) * kept(rank);
        exchange_.moved([&](int64_t number, const Copy& copy, int64_t) {
          if (tensor == Tensor::KV && owner_[at][number] != number) return;  // ranks that share heads share the rows
          row[number] = next[copy.src];
          next[copy.src] += copy.rows;
        });
        own_rows_[tensor].push_back(std::move(row));
      }
    }
  }
  bool has_own_rows(Tensor tensor) const { return own_rows_.contains(tensor); }

  // A copy's rows where attention is computed, and its home rows.
  Operand in_attention(Tensor tensor, int64_t at, const Copy& copy) const {
    return at_stage(first_stage(tensor, at), copy.dst, rows_of(tensor, Space::WORK, copy.row, copy.rows));
  }
  Operand of_caller(Tensor tensor, int64_t at, const Copy& copy) const {
    return rows_of(tensor, Space::HOME, copy.home_row, copy.rows, heads(tensor, at, copy));
  }
  // The rows at home that are sent to attention rows or arrive from them.
  Operand at_home(Tensor tensor, int64_t at, int64_t number) const {
    if (!has_own_rows(tensor)) return of_caller(tensor, at, exchange_[number]);
    const int64_t owner = tensor == Tensor::KV ? owner_[at][number] : number;
    const Copy copy = exchange_[owner];
    if (!copy.moves()) return in_attention(tensor, at, copy);
    return rows_of(tensor, Space::WORK, own_rows_.at(tensor)[at][owner], copy.rows, heads(tensor, at, copy));
  }

  // Adds transfers between ranks, and copies within a rank unless rows are produced or consumed in place.
  void move(Tensor tensor, Way way) {
    for (int64_t at = 0; at < times(tensor); ++at) {
      const Stage& stage = steps_[way == Way::IN ? first_stage(tensor, at) : last_stage(tensor, at)];
      const bool sums = tensor == Tensor::DKV && has_own_rows(tensor);
      const Growing<int64_t>& launches = way == Way::IN ? stage.inbound : sums ? stage.sums : stage.outbound;
      const auto ends = [&](int64_t number, const Copy& copy) {
        const Operand home = at_home(tensor, at, number), there = in_attention(tensor, at, copy);
        return way == Way::IN ? Ends{copy.src, copy.dst, home, there} : Ends{copy.dst, copy.src, there, home};
      };
      const auto launch = [&](const Copy&, int64_t round) { return launches[round]; };
      const int64_t copy = way == Way::IN ? stage.copy : stage.deliver;
      move_copies(program_, exchange_, has_own_rows(tensor) ? -1 : copy, launch, ends);
    }
  }

  // Places the core in one stage. Gradients of keys are added to those of earlier stages of its window. With `hold`,
  // this includes keys in tiles, which arrive with the first stage and whose gradients leave after the last.
  void attend(int64_t stage) {
    const bool opens = stages_.opens(stage) || (!backward_ && !stages_.hold);
    const bool closes = stages_.closes(stage) || (!backward_ && !stages_.hold);
    const auto rests = [&](const Operand& moved) {
      return stages_.hold && ((moved.tensor() == Tensor::KV && !opens) || (moved.tensor() == Tensor::DKV && !closes));
    };
    const auto adds = [&](const Operand& sums, int64_t rank) {
      return !opens && sums.tensor() == Tensor::DKV && (stages_.hold || sums.row() < kept(rank));
    };
    const auto put = [&](auto row, auto& rows, auto... operands) {
      row.step += narrow(steps_[stage].attend);
      ((row.*operands = at_stage(stage, row.rank, row.*operands)), ...);
      rows.push_back(row);
    };
    for (const Transfer& row : core_.transfers)
      if (!rests(row.operand)) put(row, program_.transfers, &Transfer::operand);
    for (Attention row : core_.attention) {
      if (adds(row.key_sums, row.rank)) row.first &= ~static_cast<int32_t>(FIRST_DKV);
      put(row, program_.attention, &Attention::queries, &Attention::keys, &Attention::query_sums, &Attention::key_sums);
    }
    for (const RowOp& row : core_.rowops) {
      const bool cleared = core_.steps[row.step].op == Op::CLEAR;
      if (!rests(row.a) && !(cleared && adds(row.c, row.rank)))
        put(row, program_.rowops, &RowOp::a, &RowOp::b, &RowOp::c, &RowOp::d);
    }
  }

  // Projects the heads of every rank of the group, for all pieces at home; KV heads only if a window begins.
  void project() {
    for (int64_t stage = 0; stage < stages_.count(); ++stage)
      for (int64_t number = 0; number < exchange_.size(); ++number) {
        const Copy copy = exchange_[number];
        const int64_t window = stages_.window[stage];
        const bool owns = stages_.opens(stage) && owner_[window][number] == number;
        program_.rowops.push_back({narrow(copy.src), narrow(steps_[stage].project),
                                   rows_of(Tensor::X, Space::HOME, copy.home_row, copy.rows),
                                   at_home(Tensor::Q, stage, number),
                                   owns ? at_home(Tensor::KV, window, number) : Operand(), {}});
      }
  }

  // Sums, at home, the gradients of KV heads that ranks share.
  void gather() {
    for (int64_t window = 0; window < closes_.count(); ++window)
      for (int64_t number = 0; number < exchange_.size(); ++number) {
        const Copy copy = exchange_[number];
        program_.combine(steps_[closes_[window]].add, copy.src, at_home(Tensor::DKV, window, number),
                         of_caller(Tensor::DKV, window, copy));
      }
  }

  const Lowering& low_;
  const Exchange& exchange_;
  const HeadStages& stages_;
  bool backward_;
  Growing<int64_t> group_;           // of each rank
  Growing<int64_t> opens_, closes_;  // the first and last stage of each window
  Program core_, program_;           // the attention of one stage, and the whole program
  int64_t channel_ = 0;
  Growing<Stage> steps_;
  View queries_, keys_;
  Growing<Growing<int64_t>> owner_;
  std::map<Tensor, Growing<Growing<int64_t>>> own_rows_;  // first rows, by time and copy
};

}  // namespace

Program lower_stages(const Lowering& low, bool backward) { return Stages(low, backward).run(); }

}  // namespace apportion::lower
