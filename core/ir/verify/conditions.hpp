// Conditions that a walk assumes: two rows hold the same tokens. Checked once the ranks they depend on are walked.
#pragma once

#include <vector>

#include "ir/verify/faults.hpp"

namespace apportion::verify {

// The tokens from `source` on must equal the tokens from `target` on, for each row of a place, which holds the target's
// tokens if `holds_target` is true, else the source's. code: the fault if they differ.
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
