// Totals of programs: attention pairs and bytes moved.

#include "bind.hpp"
#include "ir/areas.hpp"
#include "ir/programs.hpp"

namespace apportion {

// float64 [ranks]: (query, key) pairs of each rank, summed over heads. sizes: [1 + head sets], numbers of heads.
static Array<double> pairs(const Programs& programs, bool is_backward, Column<const int64_t> sizes) {
  const Table& list = programs.lists[is_backward ? GRADS : TASKS];
  const IntRows& columns = list.columns;
  const Ints q = columns[0], kv = columns[1], dmin = columns[columns.rows() - 3], dmax = columns[columns.rows() - 2];
  Array<double> totals(programs.ranks());
  for (int64_t rank = 0; rank < totals.size(); ++rank) {
    const int64_t first = programs.operands.ptr[rank];
    for (int64_t task = list.ptr[rank]; task < list.ptr[rank + 1]; ++task) {
      const int64_t query = first + q[task], key = first + kv[task];
      const int64_t visible = area_of(0, programs.rows[query], 0, programs.rows[key], dmin[task], dmax[task]);
      totals[rank] += static_cast<double>(visible * sizes[programs.heads[query]]);
    }
  }
  return totals;
}

// Bytes that each rank sends and receives, and bytes between nodes. row_bytes: [2, tensors], of a row of one head, in
// ordinary rounds and in rounds of results.
static std::tuple<Array<int64_t>, Array<int64_t>, int64_t> move(const Programs& programs, const HeadCounts& heads,
                                                                Matrix<const int64_t> row_bytes,
                                                                int64_t ranks_per_node) {
  Array<int64_t> sent(programs.ranks()), received(programs.ranks());
  int64_t inter_bytes = 0;
  programs.each_step([&](const Step& step) {
    if (step.op != Op::LAUNCH) return;
    const Column<const int64_t> bytes = row_bytes[(programs.mode[step.index] & RESULTS) != 0];
    for (int64_t row = step.first; row < step.end; ++row) {
      if (programs.send[row] == 0) continue;
      const int64_t at = programs.operands.ptr[step.rank] + programs.operand[row], peer = programs.peer[row];
      const int64_t row_heads = heads.of(programs.tensor_of(at), programs.heads[at]);
      const int64_t size = programs.rows[at] * row_heads * bytes[programs.tensor[at]];
      sent[step.rank] += size;
      received[peer] += size;
      if (step.rank / ranks_per_node != peer / ranks_per_node) inter_bytes += size;
    }
  });
  return {std::move(sent), std::move(received), inter_bytes};
}

static const Area area("totals", [](nb::module_& m) {
  m.def("area_of", &area_of);
  def(m, "pairs(arrays, is_backward, sizes)", pairs);
  def(m, "move(arrays, heads, row_bytes, ranks_per_node)", move);
});

}  // namespace apportion
