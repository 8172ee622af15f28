#include "ir/verify/judge.hpp"

#include <deque>

#include "threads.hpp"

namespace apportion::verify {

namespace {

// limit on notes per allowed piece: more than one, since notes of queries without visible keys make no piece
constexpr int64_t NOTES_PER_PIECE = 8;

struct Range {
  int64_t first, end;
};

std::vector<Range> ranges_of(const Program& program, const Limits& limits) {
  const int64_t ranks = program.ranks();
  const auto rows = [&](int64_t rank) {
    return program.operands.ptr[rank] + program.task_list.ptr[rank] + program.lists[ROWOPS].ptr[rank];
  };
  const int64_t count = limits.threads * (1 + rows(ranks) / (limits.threads * limits.rows));
  std::vector<Range> ranges;
  for (int64_t rank = 0, i = 1; rank < ranks; ++i) {
    const int64_t first = rank;
    while (rank < ranks && (i >= count || rows(rank) < i * rows(ranks) / count)) ++rank;
    if (rank > first) ranges.push_back({first, rank});
  }
  return ranges;
}

class Judge {
 public:
  Judge(const Program& program, Lists& lists, bool together, const Limits& limits)
      : program_(program), lists_(lists), limits_(limits), sends_(program), settlement_(sends_),
        ranges_(together ? std::vector<Range>{{0, program.ranks()}} : ranges_of(program, limits)) {
    const auto max_notes = static_cast<std::size_t>(NOTES_PER_PIECE * limits.pieces);
    for (std::size_t i = 0; i < std::min(ranges_.size(), static_cast<std::size_t>(limits.threads)); ++i)
      walks_.emplace_back(program, sends_, max_notes);
  }

  Judgement judge() {
    Verdict verdict = Verdict::WRONG;
    try {
      if (sends_.is_matched()) verdict = take(ranges_, false);
      if (verdict == Verdict::RIGHT) verdict = take(pending_, true);
    } catch (const TooMany&) {
      verdict = Verdict::TOO_MANY;
    }
    return {verdict, static_cast<int64_t>(pending_.size())};
  }

 private:
  // Walks and settles ranges in order, as many at a time as there are threads. whole: all ranks were walked before.
  Verdict take(const std::vector<Range>& ranges, bool whole) {
    for (std::size_t first = 0; first < ranges.size(); first += walks_.size()) {
      const std::size_t end = std::min(first + walks_.size(), ranges.size());
      const std::span batch(ranges.begin() + static_cast<std::ptrdiff_t>(first), end - first);
      if (!walk(batch)) return Verdict::WRONG;
      for (std::size_t i = 0; i < batch.size(); ++i) {
        const Outcome outcome = settle(walks_[i], whole || batch.back().end == program_.ranks());
        if (outcome == Outcome::ZEROS) return Verdict::ZEROS;
        if (outcome == Outcome::FAILS || (outcome == Outcome::PENDING && whole)) return Verdict::WRONG;
        if (outcome == Outcome::PENDING) pending_.push_back(batch[i]);
      }
    }
    return Verdict::RIGHT;
  }

  // Walks ranges in parallel; true if no fault was found.
  bool walk(std::span<const Range> batch) {
    std::vector<uint8_t> right(batch.size());
    run_parallel(batch.size(), [&](std::size_t i) {
      right[i] = !walks_[i].walk(batch[i].first, batch[i].end, batch[0].first);
    });
    return std::find(right.begin(), right.end(), 0) == right.end();
  }

  // Settles a walked range, and lists the attention of its tasks. whole: all ranks were walked.
  Outcome settle(Walk& walk, bool whole) {
    const Outcome outcome = settlement_.settle(walk.conditions(), false, ranges_.size() == 1);
    if (outcome != Outcome::HOLDS) return outcome;
    if (!whole && !settlement_.are_known(walk.notes())) return Outcome::PENDING;
    const int64_t limit = lists_.first_piece() + limits_.pieces;
    const bool known = settlement_.list(walk.notes(), program_.tasks, [&](const Band& band, int64_t, int64_t set) {
      if (lists_.pieces().size() > limit) throw TooMany{};
      lists_.add(band, set);
    });
    return known ? Outcome::HOLDS : Outcome::FAILS;
  }

  const Program& program_;
  Lists& lists_;
  const Limits& limits_;
  Sends sends_;
  Settlement settlement_;
  std::vector<Range> ranges_, pending_;
  std::deque<Walk> walks_;
};

// Finds the first row whose token differs from the required one, and the addresses of both.
void find_difference(Sends& sends, Fault& fault) {
  Place& place = fault.place;
  while (true) {
    const Stretch holds = sends.find(fault.holds, place.rows());
    const Stretch wanted = sends.find(fault.wanted, holds.rows);
    if (holds.token != wanted.token || wanted.rows == place.rows()) {
      place.high = place.low + wanted.rows;
      fault.holds = std::max(holds.token, NOWHERE);
      fault.wanted = std::max(wanted.token, NOWHERE);
      return;
    }
    place.low += wanted.rows;
    fault.holds = advance(fault.holds, wanted.rows);
    fault.wanted = advance(fault.wanted, wanted.rows);
  }
}

// Replaces the tokens of a fault with addresses, NOWHERE if unknown; cuts its place to the rows that have them.
void find_addresses(Sends& sends, Fault& fault) {
  switch (fault.code) {
    case Code::READ_OTHER_HEADS:
    case Code::OTHER_KEYS:
    case Code::RESULT_HEADS:
      return;
    case Code::NOT_SAME_TOKENS:
    case Code::PARTIAL_MIXED:
    case Code::WRONG_HOME:
      return find_difference(sends, fault);
    default:
      const Stretch holds = sends.find(fault.holds, fault.place.rows());
      fault.holds = std::max(holds.token, NOWHERE);
      fault.place.high = fault.place.low + holds.rows;
  }
}

}  // namespace

Judgement judge(const Program& program, Lists& lists, bool together, const Limits& limits) {
  return Judge(program, lists, together, limits).judge();
}

std::optional<Trace> trace(const Program& program, int64_t max_pieces) try {
  Trace result;
  Sends sends(program);
  if (!sends.is_matched()) return result;
  Settlement settlement(sends);
  Walk walk(program, sends, static_cast<std::size_t>(NOTES_PER_PIECE * max_pieces));
  for (int64_t rank = 0; rank < program.ranks(); ++rank) walk.walk(rank, rank + 1, rank);  // now all sends are known
  result.is_complete = true;
  for (int64_t rank = 0; rank < program.ranks(); ++rank) {
    std::optional<Fault> fault = walk.walk(rank, rank + 1, rank);
    if (settlement.settle(walk.conditions(), true, true) != Outcome::HOLDS) {
      fault = settlement.failing().fault();
      fault->rank = rank;
    }
    const bool known = settlement.list(walk.notes(), program.tasks, [&](const Band& band, int32_t task, int32_t set) {
      if (result.parts.count() > max_pieces) throw TooMany{};
      result.parts.push_back({band, task, set});
    });
    const int64_t end = program.task_list.ptr[rank + 1];
    const bool has_all = program.task_list.ptr[rank] == end || (!walk.notes().empty() && walk.notes().back().task == end - 1);
    result.is_complete = result.is_complete && known && has_all;
    if (!fault) continue;
    find_addresses(sends, *fault);
    result.faults.push_back(*fault);
  }
  return result;
} catch (const TooMany&) {
  return {};
}

}  // namespace apportion::verify
