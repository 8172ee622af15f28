// Totals of programs: attention pairs and bytes moved.
#include "bind.hpp"
#include "ir/areas.hpp"

namespace apportion {

using std::int64_t;

void bind_totals(nb::module_& m) {
  m.def("area_of", &area_of);

  m.def("pairs", [](IntsIn<"q"> q, IntsIn<"kv"> kv, IntsIn<"dmin"> dmin, IntsIn<"dmax"> dmax,
                    In<int64_t, "ptr"> ptr, In<int64_t, "first"> first, IntsIn<"rows"> rows, IntsIn<"heads"> heads,
                    In<int64_t, "sizes"> sizes) {
    New<double> found(ptr.size() - 1);
    unlocked([&] {
      for (int64_t rank = 0; rank < found.size(); ++rank) {
        found[rank] = 0;
        for (int64_t task = ptr[rank]; task < ptr[rank + 1]; ++task) {
          const int64_t query = first[rank] + q[task], key = first[rank] + kv[task];
          const int64_t below = area_of(0, rows[query], 0, rows[key], dmin[task], dmax[task]);
          found[rank] += static_cast<double>(below * sizes[heads[query]]);
        }
      }
    });
    return found.array();
  });

  m.def("move", [](In<int64_t, "until"> until, In<bool, "results"> results, IntsIn<"send"> send, IntsIn<"peer"> peer,
                   IntsIn<"operand"> operand, IntsIn<"tensor"> tensor, IntsIn<"rows"> rows, IntsIn<"heads"> heads,
                   In<int64_t, "ptr"> ptr, In<int64_t, "first"> first, In2<int64_t, "row_bytes"> row_bytes,
                   In2<int64_t, "result_bytes"> result_bytes, In<int64_t, "node"> node, Out<int64_t, "sent"> sent,
                   Out<int64_t, "received"> received) {
    return unlocked([&] {
      const Matrix<const int64_t>* per_row[2] = {&row_bytes, &result_bytes};
      int64_t between = 0, launch = 0;
      for (int64_t rank = 0; rank + 1 < ptr.size(); ++rank) {
        for (int64_t row = ptr[rank]; row < ptr[rank + 1]; ++row) {
          while (row >= until[launch]) ++launch;
          if (send[row] == 0) continue;
          const int64_t at = first[rank] + operand[row];
          const Matrix<const int64_t>& bytes = *per_row[results[launch]];
          const int64_t moved = rows[at] * bytes[tensor[at]][heads[at]];
          sent[rank] += moved;
          received[peer[row]] += moved;
          if (node[rank] != node[peer[row]]) between += moved;
        }
      }
      return between;
    });
  });
}

}  // namespace apportion
