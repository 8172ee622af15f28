// Fusion, rank after rank: rows of sums and of statistics are cut at the ends of operands, and each part is handled as
// a whole.
//
//   operands   dKV.home[0:100)     ├───────────────┤
//              dKV.home[60:160)              ├───────────────┤
//   parts                          │         │     │         │
//
// A first walk over the instructions records the last use of each part, the instruction that takes it, and the first
// task that reads its statistics; a second finds the parts that tasks complete; a third, which of these
// are taken as results.
#include "ir/fusion.hpp"

#include "bind.hpp"
#include "ir/sorting.hpp"

namespace apportion {

namespace {

constexpr int64_t NONE = -1;

// last_use: the last instruction that uses the part without taking it as a result; last_take: the last one that takes
// it as a result; takes: how many take it. first: the first instruction that reads statistics. has_other_uses: true if
// instructions other than tasks and `delta` use the statistics too.
struct Part {
  Tensor tensor;
  bool is_home;
  int64_t row;  // where it begins
  int64_t last_use = NONE, last_take = NONE, takes = 0, first = NONE;
  bool arrives = false, covered = false, written = false, has_other_uses = false;
};

class RankFusion {
 public:
  RankFusion(const Programs& programs, Fusion& fusion) : programs_(programs), fusion_(fusion) {}

  void walk(int64_t rank) {
    cut(rank);
    if (parts_.empty()) return;
    programs_.each_step(rank, [&](const Step& step) { note(step); });
    settle();
    programs_.each_step(rank, [&](const Step& step) { complete(step); });
    programs_.each_step(rank, [&](const Step& step) { take(step); });
    find_home(rank);
  }

 private:
  struct Span {
    int64_t low = 0, high = 0;  // parts of an operand; none for other tensors
  };

  // Cuts the rank's sums, and its statistics at home, into parts.
  void cut(int64_t rank) {
    constexpr Tensors sums = Tensors::of(Tensor::O, Tensor::DQ, Tensor::DKV);
    first_ = programs_.operands.ptr[rank];
    const int64_t count = programs_.operands.ptr[rank + 1] - first_;
    std::fill(std::begin(work_), std::end(work_), NONE);
    uniform_ = Tensors(~0U);
    sums_.clear();
    int64_t row_end = 0;
    for (int64_t at = first_; at < first_ + count; ++at) {
      const Tensor tensor = programs_.tensor_of(at);
      const bool is_home = programs_.is_home(at);
      if (!is_home) compare_heads(tensor, at);
      if (!sums.has(tensor) && !(tensor == Tensor::DELTA && is_home)) continue;
      sums_.push_back(at);
      row_end = std::max(row_end, programs_.row[at] + programs_.rows[at]);
    }
    const auto bits = static_cast<int>(std::bit_width(static_cast<uint64_t>(row_end)));
    keys_.clear();  // of both ends of each operand: tensor, space and row
    for (const int64_t at : sums_) {
      const int64_t key = (2 * programs_.tensor[at] + programs_.space[at]) << bits | programs_.row[at];
      keys_.push_back(key);
      keys_.push_back(key + programs_.rows[at]);
    }
    order_.resize(keys_.size());
    stable_order(keys_, order_);
    spans_.fill(count, {});
    parts_.clear();
    int64_t last = NONE;
    for (const int64_t end : order_) {
      const int64_t key = keys_[end], at = sums_[end / 2];
      if (key != last) parts_.push_back({programs_.tensor_of(at), programs_.is_home(at), key & ((int64_t{1} << bits) - 1)});
      last = key;
      Span& span = spans_[at - first_];
      (end % 2 ? span.high : span.low) = parts_.count() - 1;
    }
  }

  // Excludes a tensor from `uniform_` unless all of its work rows have the same heads in the same columns.
  void compare_heads(Tensor tensor, int64_t at) {
    int64_t& first = work_[static_cast<int64_t>(tensor)];
    if (first == NONE) first = at;
    if (programs_.col[at] != programs_.col[first] || programs_.heads[at] != programs_.heads[first])
      uniform_ = Tensors(uniform_.bits() & ~Tensors::of(tensor).bits());
  }

  int64_t operand(const Step& step, int64_t column, int64_t row) const {
    return programs_.lists[step.list].columns[column][row];
  }
  Span span_of(int64_t operand) const { return spans_[operand]; }
  template <class Visit>
  void each_part(int64_t operand, Visit&& visit) {
    const Span span = span_of(operand);
    for (int64_t part = span.low; part < span.high; ++part) visit(parts_[part]);
  }

  bool takes(const Step& step, int64_t column, int64_t row) const {
    return step.list == TRANSFERS ? sends_results(step) && programs_.send[row] == 1
                                  : step.op == Op::DELIVER && column == 0;
  }
  bool sends_results(const Step& step) const { return (programs_.mode[step.index] & RESULTS) != 0; }

  void note(const Step& step) {
    if (step.list == NO_LIST) return;
    const auto columns = OPERAND_COLUMNS[step.list];
    for (int64_t column = columns.first; column < columns.end; ++column) {
      const Ints operands = programs_.lists[step.list].columns[column];
      for (int64_t row = step.first; row < step.end; ++row) {
        const int64_t index = operands[row];
        if (span_of(index).low == span_of(index).high) continue;
        if (programs_.tensor_of(first_ + index) == Tensor::DELTA)
          note_statistics(step, column, row, index);
        else if (step.op != Op::FINISH)
          note_use(step, column, row, index);
      }
    }
  }

  void note_use(const Step& step, int64_t column, int64_t row, int64_t index) {
    const bool is_taken = takes(step, column, row);
    const bool arrives =
        step.list == TRANSFERS ? sends_results(step) && !is_taken : step.op == Op::DELIVER && column == 2;
    each_part(index, [&](Part& part) {
      (is_taken ? part.last_take : part.last_use) = step.index;
      part.takes += is_taken;
      part.arrives |= arrives;
    });
  }

  void note_statistics(const Step& step, int64_t column, int64_t row, int64_t index) {
    const bool reads = reads_statistics(step, column, row), writes = writes_statistics(step, column, row);
    each_part(index, [&](Part& part) {
      if (reads && part.first == NONE) part.first = step.index;
      part.written |= writes;
      part.has_other_uses |= !reads && !writes;
    });
  }

  bool reads_statistics(const Step& step, int64_t column, int64_t row) const {
    return step.list == GRADS && column == 3 && are_at_one_place(step, row, {3, 2, 4});
  }
  bool writes_statistics(const Step& step, int64_t column, int64_t row) const {
    return step.op == Op::DELTA && column == 2 && are_at_one_place(step, row, {2, 0, 1});
  }

  // True if these operands of a row have the same home rows, with all heads.
  bool are_at_one_place(const Step& step, int64_t row, std::initializer_list<int64_t> columns) const {
    const int64_t first_row = programs_.row[first_ + operand(step, *columns.begin(), row)];
    return std::all_of(columns.begin(), columns.end(), [&](int64_t column) {
      const int64_t at = first_ + operand(step, column, row);
      return programs_.is_home(at) && programs_.is_whole(at) && programs_.row[at] == first_row;
    });
  }

  // Work rows count only if they are taken once, after all other uses. Statistics that are not written, or that other
  // instructions use, belong to no task.
  void settle() {
    for (Part& part : parts_) {
      if (!part.written || part.has_other_uses) part.first = NONE;
      if (part.is_home) continue;
      const auto sum = std::ranges::find(SUMS, part.tensor, &Sum::tensor);
      const bool has_uniform_heads = (sum->tensors.bits() & ~uniform_.bits()) == 0;
      if (part.takes != 1 || part.last_take <= part.last_use || !has_uniform_heads) part.last_use = NONE;
    }
  }

  // Adds the runs of parts for which `holds` is true.
  template <class Holds>
  void add_runs(RowRanges& ranges, int64_t owner, Span span, Holds&& holds) {
    for (int64_t part = span.low; part < span.high; ++part) {
      const int64_t begin = part;
      while (part < span.high && holds(parts_[part])) ++part;
      if (begin < part) ranges.add(owner, parts_[begin].row, parts_[part].row);
    }
  }

  // Finds the parts that the tasks of an instruction complete, and the statistics that they compute.
  void complete(const Step& step) {
    for (std::size_t i = 0; i < SUMS.size(); ++i) {
      if (SUMS[i].list != step.list) continue;
      // if a task reads other rows than its sum has, or only some heads at home, the space of that sum is excluded: its
      // rows may have several owners, in successive launches
      bool counts[2] = {true, true};
      for (int64_t row = step.first; row < step.end; ++row) {
        const int64_t owner = first_ + operand(step, SUMS[i].column, row);
        if (!is_plain(step, SUMS[i], row)) counts[programs_.space[owner]] = false;
      }
      for (int64_t row = step.first; row < step.end; ++row) {
        const int64_t index = operand(step, SUMS[i].column, row);
        if (!counts[programs_.space[first_ + index]]) continue;
        add_runs(fusion_.sums[i].tasks, row, span_of(index), [&](Part& part) {
          const bool is_last = part.last_use == step.index;
          part.covered |= is_last;
          return is_last;
        });
      }
    }
    if (step.list != GRADS) return;
    for (int64_t row = step.first; row < step.end; ++row)
      if (reads_statistics(step, 3, row))
        add_runs(fusion_.tasks, row, span_of(operand(step, 3, row)),
                 [&](const Part& part) { return part.first == step.index; });
  }

  bool is_plain(const Step& step, const Sum& sum, int64_t row) const {
    const int64_t owner = first_ + operand(step, sum.column, row);
    const bool is_work = !programs_.is_home(owner);
    return (is_work || programs_.is_whole(owner)) &&
           std::all_of(sum.partners.begin(), sum.partners.end(), [&](int64_t column) {
             const int64_t at = first_ + operand(step, column, row);
             return programs_.space[at] == programs_.space[owner] && programs_.row[at] == programs_.row[owner] &&
                    (is_work || programs_.is_whole(at));
           });
  }

  // Finds rows that tasks complete and that are taken as results; and rows that `delta` may skip.
  void take(const Step& step) {
    if (step.op == Op::DELTA) {
      for (int64_t row = step.first; row < step.end; ++row)
        if (writes_statistics(step, 2, row))
          add_runs(fusion_.rowops, row, span_of(operand(step, 2, row)),
                   [](const Part& part) { return part.first != NONE; });
    } else if (step.op == Op::DELIVER || (step.list == TRANSFERS && sends_results(step))) {
      const int64_t column = OPERAND_COLUMNS[step.list].first;
      for (int64_t row = step.first; row < step.end; ++row) {
        if (!takes(step, column, row)) continue;
        const int64_t index = operand(step, column, row);
        for (std::size_t i = 0; i < SUMS.size(); ++i) {
          CompleteRows& sum = fusion_.sums[i];
          if (programs_.tensor_of(first_ + index) == SUMS[i].tensor)
            add_runs(step.list == TRANSFERS ? sum.sent : sum.delivered, row, span_of(index),
                     [](const Part& part) { return part.covered; });
        }
      }
    }
  }

  // The home rows of each sum that tasks complete or that arrive complete.
  void find_home(int64_t rank) {
    for (std::size_t i = 0; i < SUMS.size(); ++i) {
      const auto is_same_tensor = [&](const Part& part) { return part.tensor == SUMS[i].tensor; };
      const auto first = std::find_if(parts_.begin(), parts_.end(), is_same_tensor);
      const auto end = std::find_if_not(first, parts_.end(), is_same_tensor);
      const Span span{first - parts_.begin(), end - parts_.begin()};
      add_runs(fusion_.sums[i].home, rank, span, [](const Part& part) {
        return part.arrives || (part.covered && part.is_home);
      });
      add_runs(fusion_.sums[i].arrived, rank, span, [](const Part& part) { return part.arrives; });
    }
  }

  const Programs& programs_;
  Fusion& fusion_;
  int64_t first_ = 0;              // the first operand of the rank
  int64_t work_[TENSORS] = {};     // for each tensor, the first operand of work rows
  Tensors uniform_{0};
  Growing<int64_t> sums_, keys_, order_;
  Growing<Span> spans_;              // of each operand of the rank
  Growing<Part> parts_;
};

}  // namespace

Fusion fuse(const Programs& programs) {
  Fusion fusion;
  RankFusion rank_fusion(programs, fusion);
  for (int64_t rank = 0; rank < programs.ranks(); ++rank) rank_fusion.walk(rank);
  return fusion;
}

static const Area area("fusion", [](nb::module_& m) { def(m, "fuse(arrays)", fuse); });

}  // namespace apportion
