// Transport of surplus rows to deficit ranks under a two-level cost: apportion/planner/solvers/transport.py.

#include "bind.hpp"

namespace apportion {

namespace {

struct Flow {
  int64_t src, dst, rows;
};

// Matches senders with receivers in the order of ranks, by the north-west corner rule, in each group of `width` ranks
// separately.
void north_west(Column<const int64_t> surplus, int64_t width, Growing<Flow>& flows) {
  Array<int64_t> rest = Array<int64_t>::of(surplus);
  for (int64_t first = 0; first < rest.size(); first += width) {
    const int64_t end = std::min(first + width, rest.size());
    for (int64_t src = first, dst = first;;) {
      while (src < end && rest[src] <= 0) ++src;
      while (dst < end && rest[dst] >= 0) ++dst;
      if (src == end || dst == end) break;
      const int64_t rows = std::min(rest[src], -rest[dst]);
      flows.push_back({src, dst, rows});
      rest[src] -= rows;
      rest[dst] += rows;
    }
  }
}

// inter: the price of a row that leaves its node; saving: the price reduction for a row that stays.
struct Price {
  double inter, saving;

  double of(int64_t rows, int64_t near) const {
    return inter * static_cast<double>(rows) - saving * static_cast<double>(near);
  }
};

// The level to which all larger prices fall when `total` of the rows stay near.
double level_of(Column<const int64_t> rows, int64_t total, const Price& price) {
  std::vector<int64_t> descending(rows.begin(), rows.end());
  std::sort(descending.begin(), descending.end(), std::greater<>());
  const double saved = static_cast<double>(total) * price.saving;
  double above = 0, count = 0;
  for (const int64_t value : descending) {
    const double price_of_rank = price.inter * static_cast<double>(value);
    if (above - count * price_of_rank > saved) break;  // more is needed to lower the more expensive ranks to this price
    above += price_of_rank;
    ++count;
  }
  return (above - saved) / count;
}

// Adds `total` of the rows, times `sign`, to those at the near price. level: minimizes the largest price. A rank pays
// inter * rows - saving * near, so the near rows go to the ranks that pay most, down to a common level.
void share(Column<const int64_t> rows, int64_t total, const Price& price, bool level, int64_t sign,
           Column<int64_t> near) {
  Array<int64_t> shares(rows.size());
  if (!level || price.saving <= 0 || total >= std::accumulate(rows.begin(), rows.end(), int64_t{0})) {
    for (int64_t rank = 0; rank < rows.size(); ++rank) {
      shares[rank] = std::min(rows[rank], total);
      total -= shares[rank];
    }
  } else {
    const double level_price = level_of(rows, total, price);
    for (int64_t rank = 0; rank < rows.size(); ++rank) {
      const double amount = std::floor((price.inter * static_cast<double>(rows[rank]) - level_price) / price.saving);
      shares[rank] = std::min(std::max<int64_t>(static_cast<int64_t>(amount), 0), rows[rank]);
      total -= shares[rank];
    }
    // rows lost by rounding are given one by one to the rank that pays most; extra rows are taken from the one that
    // pays least
    while (total != 0) {
      const int64_t step = total > 0 ? 1 : -1;
      int64_t best = -1;
      for (int64_t rank = 0; rank < rows.size(); ++rank) {
        if (step > 0 ? shares[rank] >= rows[rank] : shares[rank] <= 0) continue;
        const auto pays = [&](int64_t r) { return static_cast<double>(step) * price.of(rows[r], shares[r]); };
        if (best < 0 || pays(rank) > pays(best)) best = rank;
      }
      shares[best] += step;
      total -= step;
    }
  }
  for (int64_t rank = 0; rank < rows.size(); ++rank) near[rank] += sign * shares[rank];
}

// The rows of each rank that stay in its node of `width` ranks. If levelled, senders (or receivers) share the cheap
// part so that the largest price is minimal; else the first ranks get it.
Array<int64_t> near_rows(Column<const int64_t> surplus, int64_t width, const Price& price, bool level_givers,
                           bool level_takers) {
  Array<int64_t> near(surplus.size());
  for (int64_t first = 0; first < surplus.size(); first += width) {
    const int64_t end = std::min(first + width, surplus.size());
    Array<int64_t> give(end - first), take(end - first);
    int64_t supply = 0, demand = 0;
    for (int64_t rank = first; rank < end; ++rank) {
      supply += give[rank - first] = std::max<int64_t>(surplus[rank], 0);
      demand += take[rank - first] = std::max<int64_t>(-surplus[rank], 0);
    }
    share(give, std::min(supply, demand), price, level_givers, 1, near.slice(first, end));
    share(take, std::min(supply, demand), price, level_takers, -1, near.slice(first, end));
  }
  return near;
}

Growing<Flow> two_level(Column<const int64_t> surplus, int64_t width, const Price& price, bool level_givers,
                            bool level_takers) {
  const Array<int64_t> near = near_rows(surplus, width, price, level_givers, level_takers);
  Array<int64_t> far(surplus.size());
  for (int64_t rank = 0; rank < far.size(); ++rank) far[rank] = surplus[rank] - near[rank];
  Growing<Flow> flows;
  north_west(near, width, flows);
  north_west(far, far.size(), flows);
  std::ranges::stable_sort(flows, {}, [](const Flow& flow) { return std::pair(flow.src, flow.dst); });
  return flows;
}

}  // namespace

static const Area area("transport", [](nb::module_& m) {
  def(m, "two_level(surplus, width, price, level_givers, level_takers)", two_level);
});

}  // namespace apportion
