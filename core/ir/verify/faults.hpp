// Faults of a program, thrown by the walk of a rank at the first instruction that breaks a rule; and conditions.
#pragma once

#include "ir/isa.hpp"
#include "ir/verify/tokens.hpp"

namespace apportion::verify {

// NO_FORM: an operand does not fit its op, or sends and receives do not match
#define APPORTION_CODES                                                                                          \
  NO_FORM, READ_UNWRITTEN, READ_IN_FLIGHT, READ_PARTIAL, READ_OTHER_HEADS, WRITE_SENDING, WRITE_IN_FLIGHT,        \
      WRITE_GIVEN, ADD_TO_UNWRITTEN, NOT_SAME_TOKENS, PARTIAL_SPENT, PARTIAL_LOST, PARTIAL_MIXED, PARTIAL_LEFT,   \
      PARTIAL_FROM_HOME, WRONG_HOME, WRITTEN_TWICE, NOT_FINISHED, NOT_PRODUCED, NO_RESULT, RESULT_TOUCHED,        \
      RESULT_HEADS, OTHER_KEYS
#define APPORTION_TEXT(...) #__VA_ARGS__
#define APPORTION_TEXT_OF(...) APPORTION_TEXT(__VA_ARGS__)
enum class Code : uint8_t { APPORTION_CODES };
inline constexpr const char* CODE_NAMES = "Code(" APPORTION_TEXT_OF(APPORTION_CODES) ")";

// Rows [low, high) of a tensor's home rows or arena.
struct Place {
  Tensor tensor = Tensor::NONE;
  Space space = Space::HOME;
  int64_t low = 0, high = 0;

  int64_t rows() const { return high - low; }
};

// instruction: numbered over all ranks, -1 at the end of a program; item: the row of its list.
struct Position {
  int64_t instruction = -1, item = 0;
};

// holds, wanted: actual and required contents of the rows: tokens, or head sets, or bits of heads.
struct Fault {
  Code code = Code::NO_FORM;
  Place place;
  Token holds = NOWHERE, wanted = NOWHERE;
  Position position;
  int64_t rank = -1;
};

[[noreturn, gnu::cold, gnu::noinline]] inline void fail(Code code, Place place, Token holds = NOWHERE, Token wanted = NOWHERE) {
  throw Fault{code, place, holds, wanted, {}, -1};
}

// Fails with NO_FORM, the code of unsupported forms, unless `holds`; `explain/` derives the message from the tables.
inline void require(bool holds) {
  if (!holds) fail(Code::NO_FORM, {});
}

// An assumption of a walk, checked once the ranks it depends on are walked: the tokens from `source` on must equal
// the tokens from `target` on, for each row of a place, which holds the target's tokens if `holds_target` is true,
// else the source's. code: the fault if they differ.
struct Condition {
  Token source, target;
  Code code;
  bool holds_target;
  Place place;
  Position position = {};

  // The fault if the condition does not hold.
  Fault fault() const {
    return {code, place, holds_target ? target : source, holds_target ? source : target, position, -1};
  }
};

class Conditions {
 public:
  // position: of the walk, for faults.
  explicit Conditions(const Position& position) : position_(position) {}

  void clear() { all_.clear(); }
  const std::vector<Condition>& all() const { return all_; }

  // Throws if both are known and differ.
  void require_same(Condition condition) {
    if (condition.source == condition.target) return;
    if (!is_of_tile(condition.source) && !is_of_tile(condition.target)) throw condition.fault();
    condition.position = position_;
    all_.push_back(condition);
  }

 private:
  const Position& position_;
  std::vector<Condition> all_;
};

}  // namespace apportion::verify
