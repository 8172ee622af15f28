// Numbers the rounds of edges, parents before children: apportion/planner/schedule.

#include "bind.hpp"

namespace apportion {

namespace {

// The keys of rounds that have an edge, ascending, and the round number of each edge. first: the times of the edges
// that leave home, in their order; a relay's time is `lag` after its parent's. A key is time * levels + levels - 1 -
// depth.
std::pair<Growing<int64_t>, Array<int32_t>> number_rounds(Ints parent, Column<const int64_t> depth, Ints first,
                                                          int64_t levels, int64_t lag) {
  Growing<int64_t> times, keys, distinct;
  int64_t roots = 0, key_end = 0;
  for (int64_t edge = 0; edge < parent.size(); ++edge) {
    const int64_t before = parent[edge];
    times.push_back(before < 0 ? first[roots++] : times[before] + lag);
    keys.push_back(times.back() * levels + levels - 1 - depth[edge]);
    key_end = std::max(key_end, keys.back() + 1);
  }
  Array<int32_t> number(key_end, -1), round(parent.size());
  for (const int64_t key : keys) number[key] = 0;
  for (int64_t key = 0; key < key_end; ++key) {
    if (number[key] < 0) continue;
    number[key] = static_cast<int32_t>(distinct.size());
    distinct.push_back(key);
  }
  for (int64_t edge = 0; edge < parent.size(); ++edge) round[edge] = number[keys[edge]];
  return {std::move(distinct), std::move(round)};
}

// For each round, the largest number of edges that one rank sends or receives.
Array<int64_t> degrees(Ints src, Ints dst, Ints round, int64_t rounds, int64_t ranks) {
  Array<int64_t> degree(rounds), sent(rounds * ranks), received(rounds * ranks);
  for (int64_t edge = 0; edge < src.size(); ++edge) {
    const int64_t number = round[edge];
    degree[number] = std::max({degree[number], ++sent[number * ranks + src[edge]], ++received[number * ranks + dst[edge]]});
  }
  return degree;
}

// Divides the rows that one rank sends another into `parts` equal parts. Returns the part, from 1, in which each edge
// begins; a relay is in its parent's part.
Array<int64_t> even_parts(Ints parent, Ints src, Ints dst, Ints rows, int64_t ranks, int64_t parts) {
  Array<int64_t> total(ranks * ranks), before(ranks * ranks), part(src.size());
  const auto pair = [&](int64_t edge) { return src[edge] * ranks + dst[edge]; };
  for (int64_t edge = 0; edge < src.size(); ++edge)
    if (parent[edge] < 0) total[pair(edge)] += rows[edge];
  for (int64_t edge = 0; edge < src.size(); ++edge) {
    part[edge] = parent[edge] < 0 ? 1 + before[pair(edge)] * parts / total[pair(edge)] : part[parent[edge]];
    if (parent[edge] < 0) before[pair(edge)] += rows[edge];
  }
  return part;
}

}  // namespace

static const Area area("rounds", [](nb::module_& m) {
  def(m, "number_rounds(parent, depth, first, levels, lag)", number_rounds);
  def(m, "degrees(src, dst, round, rounds, ranks)", degrees);
  def(m, "even_parts(parent, src, dst, rows, ranks, parts)", even_parts);
});

}  // namespace apportion
