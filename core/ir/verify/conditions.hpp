// Assumptions of the walk that rows hold the same tokens, checked when the ranks that they depend on were walked.
#pragma once

#include <vector>

#include "ir/verify/faults.hpp"

namespace apportion::verify {

// The rows of a place hold the tokens from `source` on, which come to where those from `target` on are; or, where
// `holds_target` is false, the other way round. code: what is wrong where they are not the same.
struct Condition {
  Token source, target;
  Code code;
  bool holds_target;
  Place place;
  Position position = {};

  // What is wrong where it does not hold.
  Fault fault() const {
    return {code, place, holds_target ? target : source, holds_target ? source : target, position, -1};
  }
};

class Conditions {
 public:
  // position: where the walk is, to be told with a fault.
  explicit Conditions(const Position& position) : position_(position) {}

  void clear() { every_.clear(); }
  const std::vector<Condition>& every() const { return every_; }

  // Throws where both are known, and differ.
  void require_same(Condition condition) {
    if (condition.source == condition.target) return;
    if (!is_of_tile(condition.source) && !is_of_tile(condition.target)) throw condition.fault();
    condition.position = position_;
    every_.push_back(condition);
  }

 private:
  const Position& position_;
  std::vector<Condition> every_;
};

}  // namespace apportion::verify
