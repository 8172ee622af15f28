// Totals of programs: attention pairs and bytes moved.
#include <algorithm>

#include "bind.hpp"
#include "ir/areas.hpp"
#include "ir/programs.hpp"

namespace apportion {

using std::int64_t;

void bind_totals(nb::module_& m) {
  m.def("area_of", &area_of);

  m.def("pairs", [](nb::tuple arrays, bool is_backward, In<int64_t, "sizes"> sizes) {
    Fields fields(arrays);
    const Programs programs = programs_of(fields);
    const auto& [ptr, columns] = programs.lists[is_backward ? GRADS : TASKS];
    New<double> found(programs.ranks());
    unlocked([&] {
      const Ints q = columns[0], kv = columns[1], dmin = columns[columns.rows() - 3], dmax = columns[columns.rows() - 2];
      for (int64_t rank = 0; rank < found.size(); ++rank) {
        const int64_t first = programs.operands.ptr[rank];
        found[rank] = 0;
        for (int64_t task = ptr[rank]; task < ptr[rank + 1]; ++task) {
          const int64_t query = first + q[task], key = first + kv[task];
          const int64_t below = area_of(0, programs.rows[query], 0, programs.rows[key], dmin[task], dmax[task]);
          found[rank] += static_cast<double>(below * sizes[programs.heads[query]]);
        }
      }
    });
    return found.array();
  });

  m.def("move", [](nb::tuple arrays, In2<int64_t, "heads"> sizes, In2<int64_t, "row_bytes"> row_bytes,
                   int64_t ranks_per_node) {
    Fields fields(arrays);
    const Programs programs = programs_of(fields);
    const HeadCounts heads{sizes};
    New<int64_t> sent(programs.ranks()), received(programs.ranks());
    int64_t between = 0;
    unlocked([&] {
      std::fill(sent.begin(), sent.end(), 0);
      std::fill(received.begin(), received.end(), 0);
      programs.each_step([&](const Step& step) {
        if (step.op != Op::LAUNCH) return;
        const Column<const int64_t> bytes = row_bytes[(programs.mode[step.at] & RESULTS) != 0];
        for (int64_t row = step.first; row < step.end; ++row) {
          if (programs.send[row] == 0) continue;
          const int64_t at = programs.operands.ptr[step.rank] + programs.operand[row], peer = programs.peer[row];
          const int64_t row_heads = heads.of(programs.tensor_of(at), programs.heads[at]);
          const int64_t moved = programs.rows[at] * row_heads * bytes[programs.tensor[at]];
          sent[step.rank] += moved;
          received[peer] += moved;
          if (step.rank / ranks_per_node != peer / ranks_per_node) between += moved;
        }
      });
    });
    return nb::make_tuple(sent.array(), received.array(), between);
  });
}

}  // namespace apportion
