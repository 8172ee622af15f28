// Settles walked ranks: resolves tokens of received rows, checks conditions, lists attention pairs.
//
//   conditions   rows that must hold the same tokens            ─► hold, fail, or depend on others (pending)
//   notes        queries of tasks: head set and runs;           ─► bands of addresses, one for each run of queries and
//                keys of a task: runs                              each run of keys that they see
//
// Adding to zeros claims them, row by row: they get the added tokens. Since earlier conditions may involve these rows,
// all are checked again.
#pragma once

#include "ir/verify/faults.hpp"
#include "ir/verify/tokens.hpp"
#include "ir/verify/sends.hpp"

namespace apportion::verify {

// A run of the queries that the tasks in the next notes share, or a run of the keys of one task.
struct Note {
  int32_t task, set;  // queries: -1, and their head set; keys: the row of the task list, and -1
  int32_t row, rows;
  Token token;

  bool is_query_run() const { return task < 0; }
  bool goes_with(const Note& other) const { return task == other.task && set == other.set; }
};

// Thrown for more pieces than the verifier accepts.
struct TooMany {};

enum class Outcome : uint8_t { HOLDS, FAILS, PENDING, ZEROS };

class Settlement {
 public:
  explicit Settlement(Sends& sends) : sends_(sends) {}

  // Checks conditions. claims: zeros may be claimed, since all conditions are present; if false, returns ZEROS instead.
  // whole: no more ranks will be walked, and unknown tokens are ignored.
  Outcome settle(const std::vector<Condition>& conditions, bool whole, bool claims) {
    do {
      claimed_ = false;
      for (const Condition& condition : conditions) {
        const Outcome outcome = settle(condition, claims);
        if (outcome == Outcome::HOLDS || (outcome == Outcome::PENDING && whole)) continue;
        failing_ = &condition;
        return outcome;
      }
    } while (claimed_);
    return Outcome::HOLDS;
  }
  // The condition that did not hold.
  const Condition& failing() const { return *failing_; }

  // True if all ranks that notes depend on were walked.
  bool are_known(std::span<const Note> notes) {
    for (const Note& note : notes)
      for (int64_t row = 0; row < note.rows;) {
        const Stretch stretch = sends_.find(advance(note.token, row), note.rows - row);
        if (stretch.token == UNSENT) return false;
        row += stretch.rows;
      }
    return true;
  }

  // Calls keep(band, task, head set) for all bands of tasks. Returns false if some tasks' rows are unknown; they are
  // skipped.
  template <class Keep>
  bool list(std::span<const Note> notes, const Tasks& tasks, Keep&& keep) {
    bool all_known = true, has_queries = false;
    int32_t set = 0;
    for (std::size_t at = 0; at < notes.size();) {
      const std::size_t first = at;
      while (at < notes.size() && notes[at].goes_with(notes[first])) ++at;
      const auto group = notes.subspan(first, at - first);
      const bool known = find_runs(group, group[0].is_query_run() ? queries_ : keys_);
      all_known = all_known && known;
      if (group[0].is_query_run()) {
        has_queries = known;
        set = group[0].set;
      } else if (known && has_queries) {
        const int32_t task = group[0].task;
        list_task(tasks.dmin[task], tasks.dmax[task], [&](const Band& band) { keep(band, task, set); });
      }
    }
    return all_known;
  }

 private:
  Outcome settle(const Condition& condition, bool claims) {
    const int64_t rows = condition.place.rows();
    for (int64_t row = 0; row < rows;) {
      const Stretch source = sends_.find(condition.source + row, rows - row);
      const Stretch target = sends_.find(condition.target + row, source.rows);
      if (source.token == UNSENT || target.token == UNSENT) return Outcome::PENDING;
      if (source.token != target.token && source.token != NOWHERE) {
        if (target.token != NOWHERE) return Outcome::FAILS;
        if (!claims) return Outcome::ZEROS;
        sends_.claim(condition.target + row, target.rows, source.token);
        claimed_ = true;
      }
      row += target.rows;
    }
    return Outcome::HOLDS;
  }

  // Fills `runs` with the addresses of rows. Returns false if they are unknown, or zeros.
  bool find_runs(std::span<const Note> notes, Runs& runs) {
    runs.clear();
    for (const Note& note : notes)
      for (int64_t row = 0; row < note.rows;) {
        const Stretch stretch = sends_.find(advance(note.token, row), note.rows - row);
        if (!is_address(stretch.token)) return false;
        if (!runs.empty() && runs.back().next() == stretch.token)
          runs.back().rows += static_cast<int32_t>(stretch.rows);
        else
          runs.push_back(run_of(note.row + row, stretch.rows, stretch.token, State::VALUE));
        row += stretch.rows;
      }
    return true;
  }

  // Runs of queries and of keys are in the order of rows, so the visible keys of a run of queries are adjacent.
  template <class Keep>
  void list_task(int64_t dmin, int64_t dmax, Keep&& keep) {
    std::size_t first = 0;
    for (const Run& query : queries_) {
      while (first < keys_.size() && keys_[first].end() <= query.row - dmax) ++first;
      for (std::size_t i = first; i < keys_.size() && keys_[i].row < query.end() - dmin; ++i) {
        const Run& key = keys_[i];
        const int64_t move = (query.token - query.row) - (key.token - key.row);
        const int64_t query_end = query.token + query.rows, key_end = key.token + key.rows;
        const int64_t low = std::max(dmin + move, query.token - key_end + 1);
        const int64_t high = std::min(dmax + move, query_end - 1 - key.token);
        keep(narrow(query.token, query_end, key.token, key_end, low, high));
      }
    }
  }
  template <class... Number>
  static Band narrow(Number... number) {
    return {static_cast<int32_t>(number)...};
  }

  Sends& sends_;
  Runs queries_, keys_;
  bool claimed_ = false;
  const Condition* failing_ = nullptr;
};

}  // namespace apportion::verify
