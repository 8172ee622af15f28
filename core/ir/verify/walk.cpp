#include "ir/verify/walk.hpp"

namespace apportion::verify {

namespace {

constexpr Tensors SUMS = Tensors::of(Tensor::DQ, Tensor::DKV, Tensor::DX);
constexpr Tensors DELIVERED = Tensors::of(Tensor::O, Tensor::DQ, Tensor::DKV);

}  // namespace

void Walk::walk_rank() {
  int64_t received = 0;
  for (int64_t send = sends_.end(number_) - 1; send >= sends_.first(number_); --send)
    next_send_[sends_[send].sender] = send;
  Position& position = rank_.position();
  program_.each_step(number_, [&](const Step& step) {
    position.instruction = step.index;
    const auto round = static_cast<RoundNumber>(program_.round[step.index]);
    const bool results = (program_.mode[step.index] & RESULTS) != 0;
    if (step.op == Op::WAIT) return wait(round);
    if (step.op == Op::LAUNCH) rank_.rounds().launch(round, step.first, step.end);
    require(step.list != (program_.is_backward ? TASKS : GRADS));
    task_before_ = -1;
    for (int64_t row = step.first; row < step.end; ++row) {
      position.item = row;
      if (step.list == TRANSFERS) {
        received += program_.send[row] == 0;
        launch(row, round, results);
      } else if (step.list == ROWOPS) {
        rowop(step.op, program_.rowop(row));
      } else {
        attend(row);
        task_before_ = row;
      }
    }
  });
  position.instruction = -1;
  end_rank(received);
}

void Walk::end_rank(int64_t received) {
  require(rank_.rounds().in_flight() == 0 && received == sends_.end(number_) - sends_.first(number_));
  for (int64_t code = 1; code < TENSORS; ++code) {
    const auto tensor = static_cast<Tensor>(code);
    if (PARTIALS.has(tensor)) rank_.work().end_rank(tensor);
    rank_.home().end_rank(tensor, program_.outputs.has(tensor), FINISHED.has(tensor));
  }
}

// ------------------------------------------------------------------------------------------------ transfers

void Walk::launch(int64_t transfer, RoundNumber round, bool results) {
  const Operand& tile = rank_[program_.operand[transfer]];
  require(tile.tensor != Tensor::NONE);
  if (results && !DELIVERED.has(tile.tensor)) fail(Code::NO_RESULT, rank_.place(tile));
  if (program_.send[transfer] != 0)
    send(tile, transfer, round, results);
  else
    receive(tile, program_.peer[transfer], round, results);
}

void Walk::send(const Operand& tile, int64_t transfer, RoundNumber round, bool results) {
  const bool is_partial = PARTIALS.has(tile.tensor);
  if (tile.is_home()) {
    if (is_partial || results) fail(results ? Code::NO_RESULT : Code::PARTIAL_FROM_HOME, rank_.place(tile));
    if (!rank_.is_input(tile)) rank_.apply(Action::SEND, tile);
    return;
  }
  rank_.gather(tile, !is_partial, runs_);
  sends_.of_transfer(transfer).carry(runs_);
  if (is_partial)
    rank_.work().spend(rank_.arena(tile), round);
  else
    rank_.work().mark_sent(rank_.arena(tile), round);
}

void Walk::receive(const Operand& tile, int64_t peer, RoundNumber round, bool results) {
  int64_t& next = next_send_[peer];
  require(next >= sends_.first(number_) && next < sends_.end(number_));
  const WorkPlace arena = rank_.arena(tile);
  const Send& send = sends_[next];
  require(send.sender == peer && send.round == round);
  require(send.rows == tile.rows && send.tensor == tile.tensor && send.heads == arena.heads);
  const bool is_partial = PARTIALS.has(tile.tensor);
  // no other thread writes the sends of previously walked ranks
  const bool is_known = send.from_home || peer < walked_ranks_ || (first_rank_ <= peer && peer < number_);
  const Token token = is_known && is_address(send.token) ? send.token : first_of_tile(next, is_partial);
  ++next;
  if (tile.is_home()) {
    if (rank_.is_input(tile)) fail(Code::WRITE_GIVEN, rank_.place(tile));
    rank_.require_home(tile, {0, tile.rows, token, State::LIVE}, Code::WRONG_HOME);
    rank_.apply(results ? Action::RECEIVE_RESULT : Action::RECEIVE, tile);
    rank_.rounds().fill_home(round);
    return;
  }
  if (results) fail(Code::NO_RESULT, rank_.place(tile));
  rank_.work().put(arena, is_partial ? State::LIVE : State::VALUE, token, round);
}

void Walk::wait(RoundNumber number) {
  const Round& round = rank_.rounds().wait(number);
  if (!round.fills_home) return;
  for (int64_t t = round.first; t < round.end; ++t) {
    const Operand& tile = rank_[program_.operand[t]];
    if (program_.send[t] == 0 && tile.is_home()) rank_.apply(Action::ARRIVE, tile);
  }
}

// ------------------------------------------------------------------------------------------------ attention

void Walk::attend(int64_t task) {
  const Tasks& table = program_.tasks;
  const bool is_backward = program_.is_backward;
  const int64_t dmin = table.dmin[task], dmax = table.dmax[task], first = table.first[task];
  const Operand &queries = rank_[table.queries[task]], &keys = rank_[table.keys[task]];
  const Operand& sum = rank_[table.sum[task]];
  require(dmin >= 1 - keys.rows && dmax <= queries.rows - 1 && dmin <= dmax);
  require(keys.tensor == Tensor::KV && queries.tensor == Tensor::Q);
  if (!program_.heads.serves[queries.heads][keys.heads])
    fail(Code::OTHER_KEYS, rank_.place(keys), keys.heads, queries.heads);
  const bool same_queries = task_before_ >= 0 && table.queries[task] == table.queries[task_before_];
  if (!same_queries) {
    rank_.gather(queries, true, runs_);
    note(runs_, -1, queries.heads);
  }
  require(sum.tensor == (is_backward ? Tensor::DQ : Tensor::O) && rank_.are_alike(sum, queries));
  if (is_backward) {
    const int64_t before = same_queries ? task_before_ : -1;
    gather_as_queries(table.gradient[task], before < 0 ? -1 : table.gradient[before], Tensor::DO, queries);
    gather_as_queries(table.statistics[task], before < 0 ? -1 : table.statistics[before], Tensor::DELTA, queries);
  }
  rank_.gather(keys, true, keys_);
  rank_.write(sum, runs_, true, (first & FIRST_DQ) != 0 ? Action::PUT : Action::ADD);
  if (is_backward) {
    const Operand& key_sum = rank_[table.key_sum[task]];
    require(key_sum.tensor == Tensor::DKV && rank_.are_alike(key_sum, keys));
    rank_.write(key_sum, keys_, true, (first & FIRST_DKV) != 0 ? Action::PUT : Action::ADD);
  }
  note(keys_, task, -1);
}

// Requires rows with the tokens of the queries, unless already checked for the previous task.
void Walk::gather_as_queries(int64_t operand, int64_t before, Tensor tensor, const Operand& queries) {
  const Operand& rows = rank_[operand];
  require(rows.tensor == tensor);
  if (operand == before) return;
  rank_.gather(rows, true, others_);
  require(rank_.are_alike(rows, queries));
  rank_.require_same_tokens(runs_, others_, rows);
}

void Walk::note(const Runs& runs, int64_t task, int64_t set) {
  if (notes_.size() + runs.size() > max_notes_) throw TooMany{};
  for (const Run& run : runs)
    notes_.push_back({static_cast<std::int32_t>(task), static_cast<std::int32_t>(set), run.row, run.rows, run.token});
}

// ------------------------------------------------------------------------------------------------ rowops

void Walk::rowop(Op op, const Rowop& args) {
  switch (op) {
    case Op::FINISH:
      return finish(args);
    case Op::DELTA:
      return delta(args);
    case Op::PROJECT:
      return project(args);
    case Op::PROJECT_GRAD:
      return project_grad(args);
    case Op::CLEAR:
      return clear(args);
    default:
      return move(op, args);
  }
}

void Walk::finish(const Rowop& args) {
  const Operand& rows = rank_[args.c];
  require(!program_.is_backward && args.a == 0 && args.b == 0 && args.d == 0);
  require(rows.is_home() && rows.tensor == Tensor::O);
  rank_.apply(Action::FINISH, rows);
}

void Walk::delta(const Rowop& args) {
  const Operand &gradient = rank_[args.a], &output = rank_[args.b], &statistics = rank_[args.c];
  require(program_.is_backward && args.d == 0 && statistics.is_home());
  require(gradient.tensor == Tensor::DO && output.tensor == Tensor::O && statistics.tensor == Tensor::DELTA);
  require(rank_.is_input(gradient) && rank_.is_input(output) && gradient.is_home() && output.is_home());
  for (const Operand* input : {&gradient, &output})
    if (input->row != statistics.row)
      fail(Code::NOT_SAME_TOKENS, rank_.place(*input), rank_.home().token(input->row), rank_.home().token(statistics.row));
  require(rank_.are_alike(output, gradient) && rank_.are_alike(statistics, gradient));
  rank_.apply(Action::SET, statistics);
}

// Projects X into Q and KV.
void Walk::project(const Rowop& args) {
  const Operand& hidden = rank_[args.a];
  rank_.gather(hidden, true, runs_);
  require(hidden.tensor == Tensor::X && args.d == 0);
  for (const auto& [x, tensor] : {std::pair{args.b, Tensor::Q}, {args.c, Tensor::KV}}) {
    if (x == 0) continue;
    require(rank_[x].rows == hidden.rows && rank_[x].tensor == tensor);
    rank_.write(rank_[x], runs_, false, Action::SET);
  }
}

// Pushes partials dQ and dKV back through the projection of X, into a partial dX.
void Walk::project_grad(const Rowop& args) {
  const Operand &hidden = rank_[args.a], &sum = rank_[args.d];
  require(program_.is_backward);
  rank_.gather(hidden, true, runs_);
  require(hidden.tensor == Tensor::X);
  for (const auto& [x, tensor] : {std::pair{args.b, Tensor::DQ}, {args.c, Tensor::DKV}}) {
    if (x == 0) continue;
    require(rank_[x].rows == hidden.rows && rank_[x].tensor == tensor);
    rank_.gather(rank_[x], false, others_, Action::PUSH_BACK);
    rank_.require_same_tokens(runs_, others_, rank_[x]);
    rank_.spend(rank_[x]);
  }
  require(sum.tensor == Tensor::DX && sum.rows == hidden.rows);
  rank_.write(sum, runs_, true, (args.first & 1) != 0 ? Action::PUT : Action::ADD);
}

void Walk::clear(const Rowop& args) {
  const Operand& rows = rank_[args.c];
  require(args.a == 0 && args.b == 0 && args.d == 0 && PARTIALS.has(rows.tensor));
  runs_.assign(1, {0, rows.rows, NOWHERE, State::CLEARED});
  rank_.write(rows, runs_, true, Action::CLEAR);
}

// Moves the rows of a into c: merge, add, copy, deliver.
void Walk::move(Op op, const Rowop& args) {
  const Operand &from = rank_[args.a], &to = rank_[args.c];
  const Tensor tensor = to.tensor;
  const bool is_partial = PARTIALS.has(tensor), is_copy = op == Op::COPY;
  require(args.a != 0 && args.b == 0 && args.d == 0);
  require(from.tensor == tensor && rank_.are_alike(to, from));
  require(from.space != to.space || from.row >= to.end() || to.row >= from.end());
  Action action = is_partial ? Action::PUT : Action::SET;
  if (op == Op::DELIVER) {
    require(DELIVERED.has(tensor) && to.is_home() && !from.is_home());
    action = Action::DELIVER;
  } else if (!is_copy) {
    require(op == Op::MERGE ? tensor == Tensor::O && !program_.is_backward
                            : op == Op::ADD && SUMS.has(tensor) && program_.is_backward);
    if ((args.first & 1) == 0) action = Action::ADD;
  }
  if (is_copy && is_partial && from.is_home()) fail(Code::PARTIAL_FROM_HOME, rank_.place(from));
  const bool values = is_copy && !is_partial;
  rank_.gather(from, values, runs_);
  if (!values) rank_.spend(from);
  rank_.write(to, runs_, is_partial, action);
}

}  // namespace apportion::verify
