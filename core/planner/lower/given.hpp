// The input of lowering: one attention kind, placed and scheduled (`Lowering` of apportion/planner/lower/inputs.py).
//
//   tasks, parts    tasks in program order, and their key ranges
//   edges           the moves of all tiles, with their rounds
//   copies          of the exchange around attention, from home rows to the attention rows of each member of a group
//   beside          tasks of single ranks, which are computed while the rows of groups travel
//
// Ranks are those of the plan unless groups are mentioned: attention is planned for groups, and every member runs it.
#pragma once

#include "owned.hpp"
#include "ir/isa.hpp"
#include "planner/numbers.hpp"

namespace apportion::lower {

struct Task {
  int64_t exec, row, rows, k, k0, k1, dmin, dmax, edge, query_edge, group;

  int64_t keys() const { return k1 - k0; }
};

struct Tasks {
  static constexpr const char* NAMES = "exec row rows k k0 k1 dmin dmax edge query_edge group";
  Ints exec, row, rows, k, k0, k1, dmin, dmax, edge, query_edge, group;

  int64_t size() const { return exec.size(); }
  Task operator[](int64_t at) const {
    return {exec[at], row[at],  rows[at], k[at],          k0[at],   k1[at],
            dmin[at], dmax[at], edge[at], query_edge[at], group[at]};
  }
};

// The key rows of tasks, in task order: at home (edge -1) or in the tile of an edge.
struct KeyParts {
  static constexpr const char* NAMES = "task edge row keys";
  Ints task, edge, row, keys;
};

struct Edges {
  static constexpr const char* NAMES = "tile home row rows src dst parent lane";
  Ints tile, home, row, rows, src, dst, parent, lane;

  int64_t size() const { return tile.size(); }
  Edge operator[](int64_t at) const {
    return {narrow(tile[at]), narrow(home[at]), narrow(row[at]),    narrow(rows[at]),
            narrow(src[at]),  narrow(dst[at]),  narrow(parent[at]), narrow(lane[at])};
  }
};

// round, returns_to, back: per edge; back: the channel of its tile's sums, if any. when, channel: per round.
struct Schedule {
  static constexpr const char* NAMES =
      "round routed.returns_to back when channel buffers leads tails levels division";
  Ints round, returns_to;
  std::unique_ptr<const Ints> back;
  Ints when, channel;
  int64_t buffers, leads, tails, levels;
  std::unique_ptr<const Ints> division;

  int64_t rounds() const { return when.size(); }
  int64_t channels() const {
    int64_t largest = 0;
    for (int64_t round = 0; round < rounds(); ++round) largest = std::max(largest, channel[round]);
    return 1 + largest;
  }
};

// A piece of the exchange on its way to one rank, from src to dst. home_row: its row among all home rows, including
// those that are not exchanged.
struct Copy {
  int64_t src, dst, piece, home_row, row, rows;

  bool moves() const { return src != dst; }
};

// `PieceTiming`: pieces that travel separately.
struct Turns {
  static constexpr const char* NAMES = "late early early_keys";
  Column<const bool> late, early, early_keys;
};

// piece, dst: per copy; src to rows: per piece; round: per copy that moves; first, held: per rank, how many
// home rows are outside and inside the exchange. shared: whether ranks return gradients of the same KV heads.
struct Exchange {
  static constexpr const char* NAMES =
      "piece dst pieces.src pieces.src_row pieces.row pieces.rows slots.round first home.per_rank slots.rounds mode direct "
      "sums turns";
  Ints piece, dst, src, src_row, row, rows, round, first, held;
  int64_t rounds, mode;
  bool direct, shared;
  std::unique_ptr<const Turns> turns;

  // The mode bits of the rounds that send rows home in a phase.
  int64_t results(bool backward) const { return backward && shared ? 0 : RESULTS; }
  int64_t size() const { return piece.size(); }
  Copy operator[](int64_t at) const {
    const int64_t p = piece[at];
    return {src[p], dst[at], p, src_row[p] + first[src[p]], row[p], rows[p]};
  }
  // Calls loop(number, copy, round) for all copies that move, and loop(number, copy) for all others.
  template <class Loop>
  void moved(Loop&& loop) const {
    int64_t number = 0;
    for (int64_t at = 0; at < size(); ++at)
      if (const Copy copy = (*this)[at]; copy.moves()) loop(at, copy, round[number++]);
  }
  template <class Loop>
  void kept(Loop&& loop) const {
    for (int64_t at = 0; at < size(); ++at)
      if (const Copy copy = (*this)[at]; !copy.moves()) loop(at, copy);
  }
};

// Heads in stages: `HeadStages` of apportion/planner/inner/groups.py. query_heads, widest: the arena columns of queries
// and of keys.
struct HeadStages {
  static constexpr const char* NAMES = "query key window query_heads widest shared project ahead hold";
  IntRows query, key;
  Ints window;
  int64_t query_heads, widest;
  bool shared, project;
  int64_t ahead;
  bool hold;

  int64_t count() const { return window.size(); }
  bool opens(int64_t stage) const { return stage == 0 || window[stage] > window[stage - 1]; }
  bool closes(int64_t stage) const { return stage + 1 == count() || window[stage] < window[stage + 1]; }
};

// first: the first rank of each group, and the end.
struct Groups {
  using Given = Ints;
  Groups() = default;
  explicit Groups(Given ranks) : first(ranks) {}
  Ints first;

  int64_t count() const { return first.size() - 1; }
  int64_t ranks() const { return first[count()]; }
  bool split() const { return count() < ranks(); }
  Growing<int64_t> of_ranks() const {
    Growing<int64_t> numbers(ranks());
    for (int64_t group = 0; group < count(); ++group)
      for (int64_t rank = first[group]; rank < first[group + 1]; ++rank) numbers[rank] = group;
    return numbers;
  }
};

// The head sets of ranks, and the columns of their arenas.
struct HeadSets {
  static constexpr const char* NAMES = "query key query_heads key_columns";
  Ints query, key, query_heads, key_columns;
};

struct Beside;

struct Lowering {
  static constexpr const char* NAMES =
      "tasks parts stage schedule.edges schedule rows.per_rank rows.row rows.starts home.per_rank heads.query "
      "heads.key_sets heads.shared tasks.queries_move heads.keys_overlap whole_results groups.first sets exchange "
      "sets.stages beside";
  Tasks tasks;
  KeyParts parts;
  Ints stage;  // of tasks
  Edges edges;
  Schedule schedule;
  Ints rows, block_row, block_start;   // rows of groups; first row and first token of blocks
  Ints home_rows;                      // of ranks
  Ints query_sets, key_sets, shared;   // of head groups; of distinct sets of KV heads; which of these each group uses
  bool queries_move, keys_overlap;
  Column<const bool> whole_results;  // of edges of queries
  Groups groups;
  HeadSets sets;
  std::unique_ptr<const Exchange> exchange;
  std::unique_ptr<const HeadStages> stages;
  std::unique_ptr<const Beside> beside;

  // True if tasks may run after the stage of their tile.
  bool later() const { return queries_move || schedule.division != nullptr; }
  Space space() const { return exchange ? Space::WORK : Space::HOME; }
  // True if tiles stay for several head stages, so that their rows are never reused.
  bool holds() const { return stages && stages->hold; }
  // How many work rows a group's attention rows take.
  int64_t kept(int64_t group) const { return exchange ? rows[group] : 0; }
  // The first key row of a task, in the attention order of the keys' home.
  int64_t key_row(const Task& task) const { return block_row[task.k] + task.k0 - block_start[task.k]; }
};

// early: which tasks are computed while rows arrive.
struct Beside {
  static constexpr const char* NAMES = "alone early";
  Lowering alone;
  Column<const bool> early;
};

// The network between nodes: `Network` of apportion/planner/congestion.py. sent: bytes per row and head, by tensor;
// first: the number of the first rank in the cluster; round_us: the time of an additional round.
struct Network {
  Ints sent;
  int64_t first, ranks_per_node, nics_per_node;
  double byte_us, round_us, incast, peers, one_peer;

  int64_t node(int64_t rank) const { return (first + rank) / ranks_per_node; }
  int64_t nic(int64_t rank) const {
    return node(rank) * nics_per_node + (first + rank) % ranks_per_node * nics_per_node / ranks_per_node;
  }
};

struct Program;

// Splits rounds in which several NICs send to the same one into rounds with fewer senders, if that is faster, and
// renumbers them. Needs no GIL.
void bound_senders(Program& program, const Lowering& low, const Network& network);

}  // namespace apportion::lower
