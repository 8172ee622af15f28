// Builds the script of a program for the simulator's event loop: the work of its instructions, its launches, and its
// transfers. The cost model computes durations later, except those of transfers and of posting.
//
//   tables ── fusion, messages, match ──► script, traffic       launches and transfers
//                                     ──► tasks, bytes          the work of instructions, which is priced
#include <unordered_map>

#include "bind.hpp"
#include "ir/areas.hpp"
#include "ir/fusion.hpp"
#include "ir/messages.hpp"
#include "ir/sorting.hpp"

namespace apportion {

namespace {

using Numbers = Growing<int64_t>;
constexpr int64_t NONE = -1;
enum Role : uint8_t { WORK, LAUNCH, WAIT };

// Sizes in bytes, by tensor: `_sizes` of apportion/planner/simulate/program.py.
struct Sizes {
  using Given = Matrix<const int64_t>;
  explicit Sizes(const Given& given) : rows(given) {}

  // of a row of one head: in an accumulator, in the model's dtype, in a message, and as a result
  int64_t wide(Tensor tensor) const { return value(0, tensor); }
  int64_t narrow(Tensor tensor) const { return value(1, tensor); }
  int64_t sent(Tensor tensor, bool as_result) const { return value(as_result ? 3 : 2, tensor); }
  int64_t result(Tensor tensor) const { return value(3, tensor); }
  // of a row with all heads, as read and written by the final cast
  int64_t cast(Tensor tensor) const { return value(4, tensor); }

 private:
  int64_t value(int64_t row, Tensor tensor) const { return rows[row][static_cast<int64_t>(tensor)]; }

  Given rows;
};

// For each op, the number of kernels, and of products with projection weights; passes: how often each operand of a row
// operation is read or written, by whether the row begins a sum, then by op.
struct Ops {
  Column<const int64_t> kernels, products;
  Matrix<const int64_t> passes;
};

// The cluster; [0] is within a node, [1] between nodes. The ranks of a node share its NICs evenly; neighbouring ranks
// share one.
struct Links {
  int64_t ranks, ranks_per_node, nics_per_node;
  Column<const double> rate, latency_us;  // bytes per microsecond

  int64_t node(int64_t rank) const { return rank / ranks_per_node; }
  int64_t port(int64_t rank, bool far, bool into) const {
    const int64_t nics = ranks / ranks_per_node * nics_per_node;
    if (!far) return into * ranks + rank;
    const int64_t nic = node(rank) * nics_per_node + rank % ranks_per_node * nics_per_node / ranks_per_node;
    return 2 * ranks + into * nics + nic;
  }
};

// `Script` of apportion/planner/simulate/program.py.
struct Script {
  Growing<uint8_t> role;
  Numbers launch, rank, round, channel, before, after, end_ptr, ends;

  auto fields() { return moved(role, launch, rank, round, channel, before, after, end_ptr, ends); }
};

// `Traffic` of apportion/planner/simulate/program.py.
struct Traffic {
  Numbers sender, receiver, out_port, in_port;
  Growing<double> wire_us, latency_us;
  Numbers bytes, tensor;

  auto fields() { return moved(sender, receiver, out_port, in_port, wire_us, latency_us, bytes, tensor); }
};

// Attention tasks and their instructions: `PricedTasks` of apportion/planner/simulate/program.py.
struct Tasks {
  Numbers rows, keys, pairs, heads, kv_heads, diagonals, first, at, accumulated;

  auto fields() { return moved(rows, keys, pairs, heads, kv_heads, diagonals, first, at, accumulated); }
};

// Row work other than attention: `RowWork` of apportion/planner/simulate/program.py.
struct RowWork {
  Numbers bytes, cast, kernels, messages, projection, projected, products;

  auto fields() { return moved(bytes, cast, kernels, messages, projection, projected, products); }
};

// For each launch, the launches before and after it in its channel on its rank, NONE if there is none.
std::tuple<Numbers, Numbers> link_channels(Column<const int64_t> rank, Column<const int64_t> channel) {
  Numbers before(rank.size(), NONE), after(before);
  std::unordered_map<int64_t, int64_t> newest;
  for (int64_t launch = 0; launch < rank.size(); ++launch) {
    if (launch > 0 && rank[launch] != rank[launch - 1]) newest.clear();
    const auto [entry, is_first] = newest.try_emplace(channel[launch], launch);
    if (is_first) continue;
    before[launch] = entry->second;
    after[entry->second] = launch;
    entry->second = launch;
  }
  return moved(before, after);
}

// The transfers of each launch, sent and received: the offsets of launches, and the transfers.
std::tuple<Numbers, Numbers> list_ends(Column<const int64_t> sender, Column<const int64_t> receiver, int64_t launches) {
  Numbers ptr(launches + 1), ends(2 * sender.size());
  for (const auto& side : {sender, receiver})
    for (const int64_t launch : side) ++ptr[launch + 1];
  for (int64_t launch = 0; launch < launches; ++launch) ptr[launch + 1] += ptr[launch];
  Numbers next(ptr);
  for (const auto& side : {sender, receiver})
    for (int64_t transfer = 0; transfer < side.size(); ++transfer) ends[next[side[transfer]]++] = transfer;
  return moved(ptr, ends);
}

class Preparation {
 public:
  Script script;
  Traffic traffic;
  Tasks tasks;
  RowWork row_work;
  // unmatched: for the first mismatch in the order of `Traffic`, the round, the sender, the receiver, and the number of
  // tiles on each side. unlaunched: the rank and the round of a wait without a launch. Both are empty for programs that
  // can run.
  Numbers unmatched, unlaunched;

  Preparation(const Programs& programs, const RowSizes& rows, const Sizes& sizes, const Ops& ops, const Links& links,
              double post_us, Column<const int64_t> home_rows, bool is_backward)
      : programs_(programs), heads_(rows.heads), sizes_(sizes), ops_(ops), links_(links), is_backward_(is_backward) {
    for (Numbers* column : {&row_work.cast, &row_work.kernels, &row_work.messages}) column->fill(programs_.ranks(), 0);
    row_work.bytes.fill(programs_.op.size(), 0);
    done_.fill(programs_.lists[ROWOPS].size(), 0);
    for (const CompleteRows& sum : fusion_.sums) subtract(sum.delivered, done_);
    subtract(fusion_.rowops, done_);
    number_launches();
    post(group(programs_, rows));
    pair_up(post_us);
    if (!unmatched.empty() || !unlaunched.empty()) return;
    std::tie(script.end_ptr, script.ends) = list_ends(traffic.sender, traffic.receiver, script.rank.count());
    programs_.each_step([&](const Step& step) { work(step); });
    if (is_backward_) cast(home_rows);
  }

 private:
  struct Range {
    int64_t lane, row0, row1, heads;
  };

  void number_launches() {
    script.role.fill(programs_.op.size(), WORK);
    script.launch.fill(programs_.op.size(), NONE);
    launch_of_.fill(programs_.send.size(), NONE);
    std::unordered_map<int64_t, int64_t> launch_of_round;
    for (int64_t rank = 0; rank < programs_.ranks(); ++rank) {
      launch_of_round.clear();
      programs_.each_step(rank, [&](const Step& step) {
        if (step.op != Op::LAUNCH) return;
        const int64_t launch = script.rank.count();
        script.role[step.index] = LAUNCH;
        script.launch[step.index] = launch;
        script.rank.push_back(rank);
        script.round.push_back(programs_.round[step.index]);
        script.channel.push_back(programs_.channel[step.index]);
        results_.push_back((programs_.mode[step.index] & RESULTS) != 0);
        launch_of_round.emplace(script.round.back(), launch);
        for (int64_t tile = step.first; tile < step.end; ++tile) launch_of_[tile] = launch;
      });
      programs_.each_step(rank, [&](const Step& step) {
        if (step.op != Op::WAIT) return;
        const auto entry = launch_of_round.find(programs_.round[step.index]);
        script.role[step.index] = WAIT;
        if (entry != launch_of_round.end())
          script.launch[step.index] = entry->second;
        else if (unlaunched.empty())
          unlaunched = {rank, programs_.round[step.index]};
      });
    }
    std::tie(script.before, script.after) = link_channels(script.rank, script.channel);
  }

  int64_t rank_of(int64_t tile) const { return script.rank[launch_of_[tile]]; }
  int64_t operand_of(int64_t tile) const { return programs_.operands.ptr[rank_of(tile)] + programs_.operand[tile]; }
  int64_t rows(int64_t operand) const { return programs_.rows[operand]; }
  int64_t heads(int64_t operand) const { return heads_.of(programs_.tensor_of(operand), programs_.heads[operand]); }
  int64_t row_bytes(int64_t operand) const {
    const Tensor tensor = programs_.tensor_of(operand);
    // the backward's O is the forward's result
    return heads(operand) * (is_backward_ && tensor == Tensor::O ? sizes_.result(tensor) : sizes_.wide(tensor));
  }
  int64_t sent_row_bytes(int64_t operand, bool as_result) const {
    return heads(operand) * sizes_.sent(programs_.tensor_of(operand), as_result);
  }

  // Counts the messages of launches, and the bytes read and written to copy tiles into sent messages and out of
  // received ones. Tiles are rounded when packed; results, on arrival.
  void post(const MessageGroups& groups) {
    for (Numbers* column : {&messages_, &packed_, &unpacked_}) column->fill(script.rank.count(), 0);
    for (const int64_t tile : groups.first) ++messages_[launch_of_[tile]];
    Numbers left;
    for (int64_t tile = 0; tile < programs_.send.size(); ++tile) left.push_back(rows(operand_of(tile)));
    for (const CompleteRows& sum : fusion_.sums) subtract(sum.sent, left);
    for (int64_t tile = 0; tile < programs_.send.size(); ++tile) {
      if (!groups.staged[groups.message[tile]]) continue;
      const int64_t launch = launch_of_[tile];
      const bool sends = programs_.send[tile] != 0;
      const int64_t operand = operand_of(tile), sent = sent_row_bytes(operand, results_[launch]);
      const int64_t stored = results_[launch] && !sends ? sent : row_bytes(operand);
      (sends ? packed_ : unpacked_)[launch] += (stored + sent) * left[tile];
    }
  }

  static void subtract(const RowRanges& ranges, Numbers& left) {
    for (std::size_t i = 0; i < ranges.size(); ++i) left[ranges.item[i]] -= ranges.row1[i] - ranges.row0[i];
  }

  // Sort key: round, then distance from sender to receiver around the circle of ranks, then sender.
  int64_t order_of(int64_t tile) const {
    const int64_t ranks = programs_.ranks(), rank = rank_of(tile), peer = programs_.peer[tile];
    const bool sends = programs_.send[tile] != 0;
    const int64_t behind = (sends ? peer - rank : rank - peer) % ranks;
    const int64_t round = script.round[launch_of_[tile]];
    return (round * ranks + (behind < 0 ? behind + ranks : behind)) * ranks + (sends ? rank : peer);
  }

  void pair_up(double post_us) {
    Numbers sends, keys;
    const Array<int64_t> mate = match(programs_, {}).first;
    if (std::find(mate.begin(), mate.end(), NONE) != mate.end()) return report_unmatched(mate);
    for (int64_t tile = 0; tile < programs_.send.size(); ++tile) {
      if (programs_.send[tile] == 0) continue;
      sends.push_back(tile);
      keys.push_back(order_of(tile));
    }
    Numbers order(sends.size());
    stable_order(keys, order);
    for (const int64_t i : order) pair_up(sends[i], mate[sends[i]], post_us);
  }

  void pair_up(int64_t sent, int64_t received, double post_us) {
    const int64_t sender = launch_of_[sent], receiver = launch_of_[received];
    const int64_t source = script.rank[sender], target = script.rank[receiver], operand = operand_of(sent);
    const bool far = links_.node(source) != links_.node(target);
    const int64_t bytes = rows(operand) * sent_row_bytes(operand, results_[sender]);
    const auto posted = static_cast<double>(std::max(messages_[sender], messages_[receiver]));
    traffic.sender.push_back(sender);
    traffic.receiver.push_back(receiver);
    traffic.out_port.push_back(links_.port(source, far, false));
    traffic.in_port.push_back(links_.port(target, far, true));
    traffic.wire_us.push_back(static_cast<double>(bytes) / links_.rate[far]);
    traffic.latency_us.push_back(links_.latency_us[far] + posted * post_us);
    traffic.bytes.push_back(bytes);
    traffic.tensor.push_back(programs_.tensor[operand]);
  }

  void report_unmatched(Column<const int64_t> mate) {
    int64_t first = NONE, counts[2] = {};
    for (int64_t tile = 0; tile < programs_.send.size(); ++tile)
      if (mate[tile] == NONE && (first == NONE || order_of(tile) < order_of(first))) first = tile;
    for (int64_t tile = 0; tile < programs_.send.size(); ++tile)
      counts[programs_.send[tile]] += order_of(tile) == order_of(first);
    const bool sends = programs_.send[first] != 0;
    const int64_t rank = rank_of(first), peer = programs_.peer[first];
    unmatched = {script.round[launch_of_[first]], sends ? rank : peer, sends ? peer : rank, counts[1], counts[0]};
  }

  void work(const Step& step) {
    const int64_t at = step.index;
    int64_t moved = 0;
    bool starts = step.first < step.end;
    if (step.op == Op::LAUNCH || step.op == Op::WAIT) {
      const int64_t launch = script.launch[at];
      moved = step.op == Op::LAUNCH ? packed_[launch] : unpacked_[launch];
      if (step.op == Op::LAUNCH) row_work.messages[step.rank] += messages_[launch];
      row_work.kernels[step.rank] += moved > 0;
    } else if (step.list == ROWOPS) {
      const bool is_partly_done = step.op == Op::DELIVER || step.op == Op::FINISH || step.op == Op::DELTA;
      moved = is_partly_done ? remaining_bytes(step, starts) : passed_bytes(step);
      if (ops_.products[programs_.op[step.index]] != 0) project(step);
    } else if (starts) {
      attend(step);
    }
    if (starts) row_work.kernels[step.rank] += ops_.kernels[programs_.op[step.index]];
    row_work.bytes[at] = moved;
  }

  int64_t operand(const Step& step, int64_t column, int64_t row) const {
    return programs_.operands.ptr[step.rank] + programs_.lists[step.list].columns[column][row];
  }

  // The bytes of the operands of row operations, counted once per read or write.
  int64_t passed_bytes(const Step& step) const {
    const int64_t code = programs_.op[step.index], codes = ops_.kernels.size();
    const Ints first = programs_.lists[ROWOPS].columns[4];
    int64_t moved = 0;
    for (int64_t row = step.first; row < step.end; ++row) {
      const Column<const int64_t> passes = ops_.passes[first[row] * codes + code];
      for (int64_t column = 0; column < passes.size(); ++column) {
        const int64_t x = operand(step, column, row);
        moved += passes[column] * rows(x) * row_bytes(x);
      }
    }
    return moved;
  }

  // Like `passed_bytes`, for operations that skip the rows done by tasks. starts: set to whether any row is left.
  int64_t remaining_bytes(const Step& step, bool& starts) {
    int64_t moved = 0, total_left = 0;
    for (int64_t row = step.first; row < step.end; ++row) {
      const int64_t a = operand(step, 0, row), b = operand(step, 1, row), c = operand(step, 2, row);
      int64_t left = done_[row], bytes = 0;  // left: so far, minus the number of rows done
      if (step.op == Op::DELIVER) {
        left += rows(a);
        bytes = row_bytes(a) + (rows(a) > 0 ? rows(c) * sent_row_bytes(c, true) / rows(a) : 0);
      } else if (step.op == Op::FINISH) {
        left += rows(c) - rows_within(fusion_.sums[0].home, step.rank, programs_.row[c], programs_.row[c] + rows(c));
        bytes = heads(c) * (sizes_.wide(Tensor::O) + sizes_.result(Tensor::O));
      } else {
        left += rows(c);
        for (const int64_t x : {a, b, c}) bytes += rows(x) > 0 ? row_bytes(x) : 0;
      }
      moved += left * bytes;
      total_left += left;
    }
    starts = total_left > 0;
    return moved;
  }

  // How many of the rows [row, stop) of a rank are in ascending ranges.
  static int64_t rows_within(const RowRanges& ranges, int64_t rank, int64_t row, int64_t stop) {
    const auto [low, high] = std::equal_range(ranges.item.begin(), ranges.item.end(), rank);
    const auto first = ranges.row1.begin() + (low - ranges.item.begin()), end = ranges.row1.begin() + (high - ranges.item.begin());
    int64_t total = 0;
    for (auto it = std::upper_bound(first, end, row); it != end; ++it) {
      const int64_t begin = *(ranges.row0.begin() + (it - ranges.row1.begin()));
      if (begin >= stop) break;
      total += std::min(*it, stop) - std::max(begin, row);
    }
    return total;
  }

  // Records the rows of X that are projected, and the bytes of a projected row in the model's dtype, times products.
  void project(const Step& step) {
    for (int64_t row = step.first; row < step.end; ++row) {
      const int64_t q = operand(step, 1, row), kv = operand(step, 2, row);
      const int64_t width = (rows(q) > 0) * heads(q) * sizes_.narrow(Tensor::Q) +
                            (rows(kv) > 0) * heads(kv) * sizes_.narrow(Tensor::KV);
      row_work.projection.push_back(step.index);
      row_work.projected.push_back(rows(operand(step, 0, row)));
      row_work.products.push_back(ops_.products[programs_.op[step.index]] * width);
    }
  }

  void attend(const Step& step) {
    const IntRows& columns = programs_.lists[step.list].columns;
    const Ints dmin = columns[columns.rows() - 3], dmax = columns[columns.rows() - 2];
    tasks.first.push_back(tasks.rows.count());
    tasks.at.push_back(step.index);
    for (int64_t row = step.first; row < step.end; ++row) {
      const int64_t q = operand(step, 0, row), kv = operand(step, 1, row);
      tasks.rows.push_back(rows(q));
      tasks.keys.push_back(rows(kv));
      tasks.pairs.push_back(area_of(0, rows(q), 0, rows(kv), dmin[row], dmax[row]));
      tasks.heads.push_back(heads(q));
      tasks.kv_heads.push_back(heads(kv));
      tasks.diagonals.push_back(dmax[row] - dmin[row] + 1);
    }
    tasks.accumulated.push_back(0);
    for (std::size_t i = 0; i < SUMS.size(); ++i)
      if (SUMS[i].list == step.list) tasks.accumulated.back() += accumulated(step, i);
  }

  // The bytes read and written for an accumulator beyond the results in the model's dtype, each row once per
  // instruction: rows that a task overwrites are not read, and complete rows are not written in the accumulator's
  // dtype. Also the bytes of the rows' statistics that the same kernel computes.
  int64_t accumulated(const Step& step, std::size_t i) {
    const Sum& sum = SUMS[i];
    const IntRows& columns = programs_.lists[step.list].columns;
    const Ints first = columns[columns.rows() - 1];
    const int64_t wide = sizes_.wide(sum.tensor);
    for (int64_t row = step.first; row < step.end; ++row) {
      const int64_t x = operand(step, sum.column, row), begin = programs_.row[x];
      ranges_.push_back(range(x, begin, begin + rows(x)));
      if ((first[row] & sum.flag) != 0) new_ranges_.push_back(ranges_.back());
    }
    int64_t moved = (2 * wide - sizes_.narrow(sum.tensor)) * covered(ranges_) - wide * covered(new_ranges_);
    moved += (sizes_.result(sum.tensor) - wide) * covered(fusion_.sums[i].tasks, next_[i], step, sum.column);
    if (sum.tensor == Tensor::DQ)  // statistics that the same kernel computes
      moved += (sizes_.result(Tensor::O) + sizes_.wide(Tensor::DELTA)) *
               covered(fusion_.tasks, next_statistic_, step, sum.column);
    return moved;
  }

  // The rows of all operands in one lane share one numbering.
  Range range(int64_t operand, int64_t row0, int64_t row1) const {
    const int64_t lane = (programs_.col[operand] * heads_.sizes.columns() + programs_.heads[operand]) * 2;
    return {lane + programs_.space[operand], row0, row1, heads(operand)};
  }

  // The number of rows in any of the ranges, times their heads. Clears the ranges.
  static int64_t covered(std::vector<Range>& ranges) {
    std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
      return a.lane != b.lane ? a.lane < b.lane : a.row0 < b.row0;
    });
    int64_t total = 0, lane = NONE, reach = 0;
    for (const Range& a : ranges) {
      if (a.lane != lane) reach = 0;
      lane = a.lane;
      total += a.heads * std::max<int64_t>(a.row1 - std::max(a.row0, reach), 0);
      reach = std::max(reach, a.row1);
    }
    ranges.clear();
    return total;
  }

  // Like the above, for the ranges of the instruction's tasks, from number `next` on.
  int64_t covered(const RowRanges& ranges, std::size_t& next, const Step& step, int64_t column) {
    for (; next < ranges.size() && ranges.item[next] < step.end; ++next)
      ranges_.push_back(range(operand(step, column, ranges.item[next]), ranges.row0[next], ranges.row1[next]));
    return covered(ranges_);
  }

  // Casts the gradients of home rows that no task has completed, and dX if it accumulates, in a single kernel.
  void cast(Column<const int64_t> home_rows) {
    bool projects = false, adds = false, from_home = false;
    programs_.each_step([&](const Step& step) {
      if (step.op != Op::PROJECT_GRAD) return;
      const auto& columns = programs_.lists[ROWOPS].columns;
      projects = true;
      for (int64_t row = step.first; row < step.end; ++row) {
        adds |= columns[4][row] == 0;
        for (int64_t column : {1, 2}) from_home |= columns[column][row] != 0 && programs_.is_home(operand(step, column, row));
      }
    });
    for (int64_t rank = 0; rank < programs_.ranks(); ++rank) {
      const int64_t rows = home_rows[rank];
      int64_t& moved = row_work.cast[rank];
      if (adds) moved = rows * sizes_.cast(Tensor::DX);
      for (std::size_t i = 0; i < SUMS.size(); ++i)
        if ((from_home || !projects) && SUMS[i].list == GRADS)
          moved += (rows - rows_within(fusion_.sums[i].home, rank, 0, rows)) * sizes_.cast(SUMS[i].tensor);
      row_work.kernels[rank] += moved > 0;
    }
  }

  const Programs& programs_;
  const HeadCounts& heads_;
  const Sizes& sizes_;
  const Ops& ops_;
  const Links& links_;
  const bool is_backward_;
  const Fusion fusion_ = fuse(programs_);
  Numbers launch_of_;                     // of each transfer
  Growing<uint8_t> results_;         // for each launch, whether it carries results
  Numbers messages_, packed_, unpacked_;  // of each launch
  Numbers done_;                          // for each row operation, minus the number of its rows done by tasks
  std::vector<Range> ranges_, new_ranges_;      // of the tasks of an instruction
  std::size_t next_[SUMS.size()] = {}, next_statistic_ = 0;
};

}  // namespace

static const Area area("script", [](nb::module_& m) {
  def(m, "prepare(programs, sizes, bytes, ops, links, post_us, home_rows, is_backward)",
      +[](const Programs& programs, const RowSizes& rows, const Sizes& bytes, const Ops& ops, const Links& links,
          double post_us, Column<const int64_t> home_rows, bool is_backward) {
        Preparation made(programs, rows, bytes, ops, links, post_us, home_rows, is_backward);
        return std::tuple(moved(made.unmatched, made.unlaunched), std::move(made.script), std::move(made.traffic),
                          std::move(made.tasks), std::move(made.row_work));
      });
  def(m, "link_channels(rank, channel)", link_channels);
  def(m, "list_ends(sender, receiver, launches)", list_ends);
});

}  // namespace apportion
