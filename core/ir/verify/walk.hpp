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

#include <optional>

#include "ir/verify/operands.hpp"
#include "ir/verify/settle.hpp"

namespace apportion::verify {

class Walk {
 public:
  Walk(const Program& program, Sends& sends, std::size_t max_notes)
      : program_(program), sends_(sends), rank_(program), max_notes_(max_notes),
        next_send_(program.ranks()) {}

  // Walks ranks [first, end); returns the first fault, if any. walked_ranks: all ranks below this were walked before
  // the current walks began.
  std::optional<Fault> walk(int64_t first, int64_t end, int64_t walked_ranks) {
    first_rank_ = first;
    walked_ranks_ = walked_ranks;
    rank_.conditions().clear();
    notes_.clear();
    for (number_ = first; number_ < end; ++number_) {
      try {
        rank_.begin(number_);
        walk_rank();
      } catch (Fault& fault) {
        fault.position = rank_.position();
        fault.rank = number_;
        return fault;
      }
    }
    return std::nullopt;
  }

  const std::vector<Condition>& conditions() { return rank_.conditions().all(); }
  std::span<const Note> notes() const { return notes_; }

 private:
  void walk_rank();
  void end_rank(int64_t received);
  void launch(int64_t transfer, RoundNumber round, bool results);
  void send(const Operand& tile, int64_t transfer, RoundNumber round, bool results);
  void receive(const Operand& tile, int64_t peer, RoundNumber round, bool results);
  void wait(RoundNumber round);
  void attend(int64_t task);
  void gather_as_queries(int64_t operand, int64_t before, Tensor tensor, const Operand& queries);
  void rowop(Op op, const Rowop& args);
  void finish(const Rowop& args);
  void delta(const Rowop& args);
  void project(const Rowop& args);
  void project_grad(const Rowop& args);
  void clear(const Rowop& args);
  void move(Op op, const Rowop& args);
  void note(const Runs& runs, int64_t task, int64_t set);

  const Program& program_;
  Sends& sends_;
  Rank rank_;
  std::size_t max_notes_;
  Array<int64_t> next_send_;  // for each rank, its next send to the current one
  std::vector<Note> notes_;
  Runs runs_, keys_, others_;
  int64_t number_ = 0, first_rank_ = 0, walked_ranks_ = 0;
  int64_t task_before_ = -1;  // the previous task of the same instruction
};

}  // namespace apportion::verify
