// The walk over ranks, one after another: every instruction and its effect on the rank's rows.
//
//   launch          sends carry gathered contents; receives get the contents of their send, or its number
//   wait            received home rows are present; sent rows may be overwritten
//   attend, _grad   queries and keys are noted (`settle.hpp`); partials are put or added
//   rowops          finish, delta │ project, project_grad │ clear, and ops that move rows: merge, add, copy, deliver
//
// It ends at the first fault. Its results are the sends of its ranks, conditions and notes. What another walk sends
// from work rows is used only if that walk ended before the current ones began.
#pragma once

#include "ir/verify/operands.hpp"
#include "ir/verify/settle.hpp"

namespace apportion::verify {

class Walk : Rank {
 public:
  Walk(const Program& program, Sends& sends, std::size_t max_notes)
      : Rank(program), sends_(sends), max_notes_(max_notes), next_send_(program.ranks()) {}

  // Walks ranks [first, end); returns the first fault, if any. walked_ranks: all ranks below this were walked before
  // the current walks began.
  std::optional<Fault> walk(int64_t first, int64_t end, int64_t walked_ranks) {
    first_rank_ = first;
    walked_ranks_ = walked_ranks;
    conditions_.clear();
    notes_.clear();
    for (number_ = first; number_ < end; ++number_) {
      try {
        begin_rank(number_);
        walk_rank();
      } catch (Fault& fault) {
        fault.position = position_;
        fault.rank = number_;
        return fault;
      }
    }
    return std::nullopt;
  }

  const std::vector<Condition>& conditions() { return conditions_.all(); }
  std::span<const Note> notes() const { return notes_; }

 private:
  static constexpr Tensors SUMS = Tensors::of(Tensor::DQ, Tensor::DKV, Tensor::DX);
  static constexpr Tensors DELIVERED = Tensors::of(Tensor::O, Tensor::DQ, Tensor::DKV);

  void walk_rank() {
    int64_t received = 0;
    for (int64_t send = sends_.end(number_) - 1; send >= sends_.first(number_); --send)
      next_send_[sends_[send].sender] = send;
    program_.each_step(number_, [&](const Step& step) {
      position_.instruction = step.index;
      const auto round = static_cast<RoundNumber>(program_.round[step.index]);
      const bool results = (program_.mode[step.index] & RESULTS) != 0;
      if (step.op == Op::WAIT) return wait(round);
      if (step.op == Op::LAUNCH) rounds_.launch(round, step.first, step.end);
      require(step.list != (program_.is_backward ? TASKS : GRADS));
      task_before_ = -1;
      for (int64_t row = step.first; row < step.end; ++row) {
        position_.item = row;
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
    position_.instruction = -1;
    end_rank(received);
  }

  void end_rank(int64_t received) {
    require(rounds_.in_flight() == 0 && received == sends_.end(number_) - sends_.first(number_));
    for (int64_t code = 1; code < TENSORS; ++code) {
      const auto tensor = static_cast<Tensor>(code);
      if (PARTIALS.has(tensor)) work_.end_rank(tensor);
      home_.end_rank(tensor, program_.outputs.has(tensor), FINISHED.has(tensor));
    }
  }

  // ---- transfers

  void launch(int64_t transfer, RoundNumber round, bool results) {
    const Operand& tile = at(program_.operand[transfer]);
    require(tile.tensor != Tensor::NONE);
    if (results && !DELIVERED.has(tile.tensor)) fail(Code::NO_RESULT, place(tile));
    if (program_.send[transfer] != 0)
      send(tile, transfer, round, results);
    else
      receive(tile, program_.peer[transfer], round, results);
  }

  void send(const Operand& tile, int64_t transfer, RoundNumber round, bool results) {
    const bool is_partial = PARTIALS.has(tile.tensor);
    if (tile.is_home()) {
      if (is_partial || results) fail(results ? Code::NO_RESULT : Code::PARTIAL_FROM_HOME, place(tile));
      if (!is_input(tile)) apply(Action::SEND, tile);
      return;
    }
    gather(tile, !is_partial, runs_);
    sends_.of_transfer(transfer).carry(runs_);
    if (is_partial)
      work_.spend(arena(tile), round);
    else
      work_.mark_sent(arena(tile), round);
  }

  void receive(const Operand& tile, int64_t peer, RoundNumber round, bool results) {
    int64_t& next = next_send_[peer];
    require(next >= sends_.first(number_) && next < sends_.end(number_));
    const WorkPlace rows = arena(tile);
    const Send& send = sends_[next];
    require(send.sender == peer && send.round == round);
    require(send.rows == tile.rows && send.tensor == tile.tensor && send.heads == rows.heads);
    const bool is_partial = PARTIALS.has(tile.tensor);
    // no other thread writes the sends of previously walked ranks
    const bool is_known = send.from_home || peer < walked_ranks_ || (first_rank_ <= peer && peer < number_);
    const Token token = is_known && is_address(send.token) ? send.token : first_of_tile(next, is_partial);
    ++next;
    if (tile.is_home()) {
      if (is_input(tile)) fail(Code::WRITE_GIVEN, place(tile));
      require_home(tile, {0, tile.rows, token, State::LIVE}, Code::WRONG_HOME);
      apply(results ? Action::RECEIVE_RESULT : Action::RECEIVE, tile);
      rounds_.fill_home(round);
      return;
    }
    if (results) fail(Code::NO_RESULT, place(tile));
    work_.put(rows, is_partial ? State::LIVE : State::VALUE, token, round);
  }

  void wait(RoundNumber number) {
    const Round& round = rounds_.wait(number);
    if (!round.fills_home) return;
    for (int64_t t = round.first; t < round.end; ++t) {
      const Operand& tile = at(program_.operand[t]);
      if (program_.send[t] == 0 && tile.is_home()) apply(Action::ARRIVE, tile);
    }
  }

  // ---- attention

  void attend(int64_t task) {
    const Tasks& table = program_.tasks;
    const bool is_backward = program_.is_backward;
    const int64_t dmin = table.dmin[task], dmax = table.dmax[task], first = table.first[task];
    const Operand &queries = at(table.queries[task]), &keys = at(table.keys[task]);
    const Operand& sum = at(table.sum[task]);
    require(dmin >= 1 - keys.rows && dmax <= queries.rows - 1 && dmin <= dmax);
    require(keys.tensor == Tensor::KV && queries.tensor == Tensor::Q);
    if (!program_.heads.serves[queries.heads][keys.heads])
      fail(Code::OTHER_KEYS, place(keys), keys.heads, queries.heads);
    const bool same_queries = task_before_ >= 0 && table.queries[task] == table.queries[task_before_];
    if (!same_queries) {
      gather(queries, true, runs_);
      note(runs_, -1, queries.heads);
    }
    require(sum.tensor == (is_backward ? Tensor::DQ : Tensor::O) && are_alike(sum, queries));
    if (is_backward) {
      const int64_t before = same_queries ? task_before_ : -1;
      gather_as_queries(table.gradient[task], before < 0 ? -1 : table.gradient[before], Tensor::DO, queries);
      gather_as_queries(table.statistics[task], before < 0 ? -1 : table.statistics[before], Tensor::DELTA, queries);
    }
    gather(keys, true, keys_);
    write(sum, runs_, true, (first & FIRST_DQ) != 0 ? Action::PUT : Action::ADD);
    if (is_backward) {
      const Operand& key_sum = at(table.key_sum[task]);
      require(key_sum.tensor == Tensor::DKV && are_alike(key_sum, keys));
      write(key_sum, keys_, true, (first & FIRST_DKV) != 0 ? Action::PUT : Action::ADD);
    }
    note(keys_, task, -1);
  }

  // Requires rows with the tokens of the queries, unless already checked for the previous task.
  void gather_as_queries(int64_t operand, int64_t before, Tensor tensor, const Operand& queries) {
    const Operand& rows = at(operand);
    require(rows.tensor == tensor);
    if (operand == before) return;
    gather(rows, true, others_);
    require(are_alike(rows, queries));
    require_same_tokens(runs_, others_, rows);
  }

  void note(const Runs& runs, int64_t task, int64_t set) {
    if (notes_.size() + runs.size() > max_notes_) throw TooMany{};
    for (const Run& run : runs)
      notes_.push_back({static_cast<int32_t>(task), static_cast<int32_t>(set), run.row, run.rows, run.token});
  }

  // ---- rowops

  void rowop(Op op, const Rowop& args) {
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

  void finish(const Rowop& args) {
    const Operand& rows = at(args.c);
    require(!program_.is_backward && args.a == 0 && args.b == 0 && args.d == 0);
    require(rows.is_home() && rows.tensor == Tensor::O);
    apply(Action::FINISH, rows);
  }

  void delta(const Rowop& args) {
    const Operand &gradient = at(args.a), &output = at(args.b), &statistics = at(args.c);
    require(program_.is_backward && args.d == 0 && statistics.is_home());
    require(gradient.tensor == Tensor::DO && output.tensor == Tensor::O && statistics.tensor == Tensor::DELTA);
    require(is_input(gradient) && is_input(output) && gradient.is_home() && output.is_home());
    for (const Operand* input : {&gradient, &output})
      if (input->row != statistics.row)
        fail(Code::NOT_SAME_TOKENS, place(*input), home_.token(input->row), home_.token(statistics.row));
    require(are_alike(output, gradient) && are_alike(statistics, gradient));
    apply(Action::SET, statistics);
  }

  // Projects X into Q and KV.
  void project(const Rowop& args) {
    const Operand& hidden = at(args.a);
    gather(hidden, true, runs_);
    require(hidden.tensor == Tensor::X && args.d == 0);
    for (const auto& [x, tensor] : {std::pair{args.b, Tensor::Q}, {args.c, Tensor::KV}}) {
      if (x == 0) continue;
      require(at(x).rows == hidden.rows && at(x).tensor == tensor);
      write(at(x), runs_, false, Action::SET);
    }
  }

  // Pushes partials dQ and dKV back through the projection of X, into a partial dX.
  void project_grad(const Rowop& args) {
    const Operand &hidden = at(args.a), &sum = at(args.d);
    require(program_.is_backward);
    gather(hidden, true, runs_);
    require(hidden.tensor == Tensor::X);
    for (const auto& [x, tensor] : {std::pair{args.b, Tensor::DQ}, {args.c, Tensor::DKV}}) {
      if (x == 0) continue;
      require(at(x).rows == hidden.rows && at(x).tensor == tensor);
      gather(at(x), false, others_, Action::PUSH_BACK);
      require_same_tokens(runs_, others_, at(x));
      spend(at(x));
    }
    require(sum.tensor == Tensor::DX && sum.rows == hidden.rows);
    write(sum, runs_, true, (args.first & 1) != 0 ? Action::PUT : Action::ADD);
  }

  void clear(const Rowop& args) {
    const Operand& rows = at(args.c);
    require(args.a == 0 && args.b == 0 && args.d == 0 && PARTIALS.has(rows.tensor));
    runs_.assign(1, {0, rows.rows, NOWHERE, State::CLEARED});
    write(rows, runs_, true, Action::CLEAR);
  }

  // Moves the rows of a into c: merge, add, copy, deliver.
  void move(Op op, const Rowop& args) {
    const Operand &from = at(args.a), &to = at(args.c);
    const Tensor tensor = to.tensor;
    const bool is_partial = PARTIALS.has(tensor), is_copy = op == Op::COPY;
    require(args.a != 0 && args.b == 0 && args.d == 0);
    require(from.tensor == tensor && are_alike(to, from));
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
    if (is_copy && is_partial && from.is_home()) fail(Code::PARTIAL_FROM_HOME, place(from));
    const bool values = is_copy && !is_partial;
    gather(from, values, runs_);
    if (!values) spend(from);
    write(to, runs_, is_partial, action);
  }

  Sends& sends_;
  std::size_t max_notes_;
  Array<int64_t> next_send_;  // for each rank, its next send to the current one
  std::vector<Note> notes_;
  Runs runs_, keys_, others_;
  int64_t number_ = 0, first_rank_ = 0, walked_ranks_ = 0;
  int64_t task_before_ = -1;  // the previous task of the same instruction
};

}  // namespace apportion::verify
