// The current rank: its operands and the state of their rows.
//
//   operand ─► gather ─► runs of tokens ─► write ─► operand        of home rows or an arena, values or partials
//
// `home_rows.hpp` and `work_rows.hpp` store the state of rows; all ranks reuse the same memory.
#pragma once

#include "ir/verify/home_rows.hpp"
#include "ir/verify/program.hpp"
#include "ir/verify/work_rows.hpp"

namespace apportion::verify {

class Rank {
 protected:
  explicit Rank(const Program& program)
      : program_(program), rounds_(program.rounds), conditions_(position_), home_(program.heads), work_(rounds_, conditions_) {}

  Rank(const Rank&) = delete;  // its parts refer to each other

  // Begins a rank, with nothing written. Throws if an operand lies outside its rows.
  void begin_rank(int64_t rank) {
    position_ = {};
    rounds_.begin_rank();
    const Memory& memory = program_.memory;
    home_.begin_rank(memory.home_rows[rank], memory.first_address[rank]);
    work_.begin_rank(memory.arena_rows[rank]);
    const Table& table = program_.operands;
    const int64_t first = table.ptr[rank], count = table.ptr[rank + 1] - first;
    operands_.resize(static_cast<std::size_t>(count));
    table.columns.visit([&](const auto& columns) {
      for (int64_t x = 0; x < count; ++x) {
        Operand& operand = operands_[static_cast<std::size_t>(x)];
        operand = operand_at(columns, first + x);
        require(x == 0 || (columns[HEAD_COLUMN][first + x] == 0 && is_placed(operand, rank)));
      }
    });
  }

  const Operand& at(int64_t x) const {
    check_index(x, static_cast<int64_t>(operands_.size()));
    return operands_[static_cast<std::size_t>(x)];
  }

  Place place(const Operand& x) const { return {x.tensor, x.space, x.row, x.end()}; }
  WorkPlace arena(const Operand& x) const {
    return {x.tensor, static_cast<int32_t>(program_.heads.number_of(x.tensor, x.heads)), x.row, x.end()};
  }
  bool is_input(const Operand& x) const { return program_.inputs.has(x.tensor); }

  void apply(Action action, const Operand& x) { home_.apply(action, x.tensor, x.row, x.end(), x.heads); }

  // Gathers the contents of an operand: values, which remain, or partials. home_action: the action if partials are at home.
  void gather(const Operand& x, bool values, Runs& runs, Action home_action = Action::TAKE) {
    if (!x.is_home()) return work_.read(arena(x), values, runs);
    require(values || !is_input(x));
    if (!is_input(x)) apply(values ? Action::READ : home_action, x);
    runs.assign(1, {0, x.rows, home_.token(x.row), values ? State::VALUE : State::LIVE});
  }

  // Stores runs in an operand, as partials or values, or adds them to it; cleared rows stay cleared. home_action: the
  // action on home rows; ADD also adds in an arena.
  void write(const Operand& x, const Runs& runs, bool is_partial, Action home_action) {
    if (x.is_home()) return write_home(x, runs, home_action);
    WorkPlace place = arena(x);
    for (const Run& run : runs) {
      place.low = x.row + run.row;
      place.high = place.low + run.rows;
      const State state = run.state == State::CLEARED ? State::CLEARED : is_partial ? State::LIVE : State::VALUE;
      if (home_action == Action::ADD)
        work_.add(place, state, run.token);
      else
        work_.put(place, state, run.token);
    }
  }

  // Consumes partials of an arena.
  void spend(const Operand& x) {
    if (!x.is_home()) work_.spend(arena(x));
  }

  // Requires that a run of a home operand has that home's tokens.
  void require_home(const Operand& x, const Run& run, Code code) {
    const int64_t low = x.row + run.row;
    conditions_.require_same({run.token, home_.token(low), code, true, {x.tensor, Space::HOME, low, low + run.rows}});
  }

  // True if x and y have equally many rows and, if y's tensor has heads, the same heads.
  bool are_alike(const Operand& x, const Operand& y) const {
    if (x.rows != y.rows) return false;
    const HeadSets& heads = program_.heads;
    return HEADLESS.has(y.tensor) || heads.number_of(x.tensor, x.heads) == heads.number_of(y.tensor, y.heads);
  }

  // Requires that x, whose runs are `others`, holds the tokens of `runs` row by row; cleared rows match any tokens.
  void require_same_tokens(const Runs& runs, const Runs& others, const Operand& x) {
    int64_t row = 0;
    for (std::size_t i = 0, j = 0; i < runs.size() && j < others.size();) {
      const int64_t stop = std::min(runs[i].end(), others[j].end());
      if (runs[i].token != NOWHERE && others[j].token != NOWHERE)
        conditions_.require_same({runs[i].token + row - runs[i].row,
                                  others[j].token + row - others[j].row,
                                  Code::NOT_SAME_TOKENS,
                                  true,
                                  {x.tensor, x.space, x.row + row, x.row + stop}});
      row = stop;
      i += runs[i].end() == stop;
      j += others[j].end() == stop;
    }
  }

  bool is_placed(const Operand& x, int64_t rank) const {
    const Memory& memory = program_.memory;
    const bool headless = HEADLESS.has(x.tensor);
    if (program_.foreign.has(x.tensor) || (headless && x.heads != 0)) return false;
    if (x.is_home()) return x.end() <= memory.home_rows[rank];
    const auto tensor = static_cast<int64_t>(x.tensor);
    return x.end() <= memory.arena_rows[rank][tensor] &&
           program_.heads.size_of(x.tensor, x.heads) <= memory.arena_heads[rank][tensor];
  }

  void write_home(const Operand& x, const Runs& runs, Action action) {
    if (is_input(x)) fail(Code::WRITE_GIVEN, place(x));
    for (const Run& run : runs)
      if (run.token != NOWHERE) require_home(x, run, action == Action::ADD ? Code::PARTIAL_MIXED : Code::WRONG_HOME);
    apply(action, x);
  }

  const Program& program_;
  Position position_;
  Rounds rounds_;
  Conditions conditions_;
  HomeRows home_;
  WorkRows work_;
  std::vector<Operand> operands_;
};

}  // namespace apportion::verify
