#include "ir/sorting.hpp"

#include "bind.hpp"

namespace apportion {

namespace {

struct Item {
  uint64_t key;  // relative to the smallest
  int64_t index;
};

constexpr int64_t MAX_COMPARED = 256;  // number of keys up to which comparing beats counting
constexpr int DIGIT = 11;          // limit of bits per pass: counters stay in the first-level cache

void sort_by_digits(std::vector<Item>& items, uint64_t largest) {
  const int bits = static_cast<int>(std::bit_width(largest));
  const int widest = items.size() < 4096 ? 8 : DIGIT;
  const int passes = (bits + widest - 1) / widest;
  const int digit = (bits + passes - 1) / passes;
  const uint64_t mask = (uint64_t{1} << digit) - 1;
  std::vector<Item> other(items.size());
  std::vector<std::size_t> starts(mask + 2);
  for (int shift = 0; shift < bits; shift += digit) {
    std::fill(starts.begin(), starts.end(), 0);
    for (const Item& item : items) ++starts[((item.key >> shift) & mask) + 1];
    for (std::size_t value = 0; value <= mask; ++value) starts[value + 1] += starts[value];
    for (const Item& item : items) other[starts[(item.key >> shift) & mask]++] = item;
    items.swap(other);
  }
}

}  // namespace

void stable_order(Column<const int64_t> keys, Column<int64_t> order) {
  if (std::is_sorted(keys.begin(), keys.end())) {
    std::iota(order.begin(), order.end(), 0);
    return;
  }
  const auto [low, high] = std::minmax_element(keys.begin(), keys.end());
  const auto base = static_cast<uint64_t>(*low);
  std::vector<Item> items(static_cast<std::size_t>(keys.size()));
  for (int64_t i = 0; i < keys.size(); ++i)
    items[static_cast<std::size_t>(i)] = {static_cast<uint64_t>(keys[i]) - base, i};
  if (keys.size() <= MAX_COMPARED) {
    std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
      return a.key != b.key ? a.key < b.key : a.index < b.index;
    });
  } else {
    sort_by_digits(items, static_cast<uint64_t>(*high) - base);
  }
  for (int64_t i = 0; i < keys.size(); ++i) order[i] = items[static_cast<std::size_t>(i)].index;
}

// The distinct keys, ascending; and the rank of each key among them.
static std::pair<Growing<int64_t>, Array<int64_t>> unique_inverse(Column<const int64_t> keys) {
  Growing<int64_t> distinct;
  Array<int64_t> order(keys.size()), number(keys.size());
  stable_order(keys, order);
  for (const int64_t at : order) {
    if (distinct.empty() || distinct.back() != keys[at]) distinct.push_back(keys[at]);
    number[at] = distinct.count() - 1;
  }
  return {std::move(distinct), std::move(number)};
}

static const Area area("sorting", [](nb::module_& m) {
  def(m, "stable_order(keys)", +[](Column<const int64_t> keys) {
    Array<int64_t> order(keys.size());
    stable_order(keys, order);
    return order;
  });
  def(m, "counting_order(keys, size)", +[](Ints keys, int64_t size) {
    Array<int32_t> order(keys.size());
    keys.visit([&](auto column) { counting_order<decltype(column), int32_t>(column, size, order); });
    return order;
  });
  def(m, "unique_inverse(keys)", unique_inverse);
});

}  // namespace apportion
