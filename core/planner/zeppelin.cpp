// Zeppelin's two levels of partitioning (section 3.1), and zig-zag blocks of sequences on several ranks (section 3.2).
// A drawing of the levels is at the head of apportion/planner/place/zeppelin.py.
//
//     a level   sequences, longest first; those at or above the level's threshold are split, the others go to a bucket
//               as a whole. If one of these fits into no bucket, the threshold is lowered to the length of the longest
//               of them, and the level starts over

#include "bind.hpp"
#include "planner/numbers.hpp"

namespace apportion {

namespace {

constexpr double WHOLE = 1e-9;  // a quotient above a whole number by at most this much is taken as that number

using Order = Growing<int64_t>;

// Nodes, or the ranks of a node, with capacities.
class Buckets {
 public:
  // enforce: when a sequence is split, keep every bucket within its cap if possible.
  Buckets(Column<const int64_t> caps, bool enforce)
      : caps_(caps), load_(static_cast<std::size_t>(caps.size())), enforce_(enforce) {}

  int64_t size() const { return caps_.size(); }

  void add(const Array<int64_t>& share) {
    for (int64_t bucket = 0; bucket < size(); ++bucket) load_[bucket] += share[bucket];
  }

  // Splits `tokens` in proportion to caps over the `fragments` least full buckets. If caps are enforced: over as many more
  // as needed to exceed no cap; if even all buckets are too few, minimizes the fullness of the fullest.
  Array<int64_t> split(int64_t tokens, int64_t fragments) const {
    Order order = by_fullness();
    for (int64_t wide = std::min(fragments, size()); wide <= size(); ++wide) {
      Array<int64_t> share = shared(tokens, {order.begin(), order.begin() + wide});
      if (!enforce_ || fits(share)) return share;
    }
    return levelled(tokens);
  }

  // Splits `tokens` into fragments in proportion to caps, round-robin from bucket `turn` on. If caps are enforced and
  // the fragments do not fit there, does the same as `split`.
  Array<int64_t> by_turns(int64_t tokens, int64_t fragments, int64_t turn) const {
    Order members;
    for (int64_t nth = 0; nth < fragments; ++nth) members.push_back((turn + nth) % size());
    Array<int64_t> share = shared(tokens, members);
    return enforce_ && !fits(share) ? split(tokens, fragments) : std::move(share);
  }

  // Puts each item in turn into the least full bucket with room for it; stops at the first that fits into no bucket.
  // Returns the buckets of the items placed.
  template <class Sizes>
  Order whole(const Sizes& sizes, int64_t begin, int64_t end) {
    Order buckets;
    heap_ = by_fullness();
    for (int64_t item = begin; item < end; ++item) {
      const int64_t at = position_with_room(sizes(item));
      if (at < 0) break;
      load_[heap_[at]] += sizes(item);
      buckets.push_back(heap_[at]);
      sink(at);
    }
    return buckets;
  }

 private:
  Order by_fullness() const {
    Growing<double> full;
    for (int64_t bucket = 0; bucket < size(); ++bucket) full.push_back(real(load_[bucket]) / real(caps_[bucket]));
    return ordered(size(), [&](int64_t a, int64_t b) { return full[a] < full[b]; });
  }

  // Splits `tokens` over some buckets in proportion to their caps; the first of them get the remainder.
  Array<int64_t> shared(int64_t tokens, const Order& members) const {
    Array<int64_t> share(size());
    int64_t room = 0, left = tokens;
    for (const int64_t bucket : members) room += caps_[bucket];
    for (const int64_t bucket : members) left -= share[bucket] = tokens * caps_[bucket] / room;
    for (int64_t nth = 0; nth < left; ++nth) ++share[members[nth]];
    return share;
  }

  // Whether no bucket with a share exceeds its cap.
  bool fits(const Array<int64_t>& share) const {
    for (int64_t bucket = 0; bucket < size(); ++bucket)
      if (share[bucket] != 0 && load_[bucket] + share[bucket] > caps_[bucket]) return false;
    return true;
  }

  // Gives `tokens` to the least full buckets, up to a common level: that of a bucket with the largest cap, and in
  // proportion to caps for the others.
  Array<int64_t> levelled(int64_t tokens) const {
    const int64_t largest = *std::max_element(caps_.begin(), caps_.end());
    Array<int64_t> share(size());
    const auto fill_to = [&](int64_t level) {
      int64_t sum = 0;
      for (int64_t bucket = 0; bucket < size(); ++bucket)
        sum += share[bucket] = std::max<int64_t>(level * caps_[bucket] / largest - load_[bucket], 0);
      return sum;
    };
    const int64_t highest = *std::max_element(load_.begin(), load_.end()) + tokens;
    const int64_t below = bisect(-1, highest, [&](int64_t level) { return fill_to(level) < tokens; });
    int64_t excess = fill_to(below + 1) - tokens;
    for (int64_t bucket = 0; bucket < size() && excess > 0; ++bucket) {
      if (share[bucket] == 0) continue;
      --share[bucket];
      --excess;
    }
    return share;
  }

  bool before(int64_t a, int64_t b) const {
    const int64_t left = load_[a] * caps_[b], right = load_[b] * caps_[a];
    return left < right || (left == right && a < b);
  }

  // The heap position of the least full bucket with room for `tokens`, or -1.
  int64_t position_with_room(int64_t tokens) const {
    const auto fits_at = [&](int64_t at) { return load_[heap_[at]] + tokens <= caps_[heap_[at]]; };
    if (fits_at(0)) return 0;
    int64_t best = -1;
    for (int64_t at = 1; at < size(); ++at)
      if (fits_at(at) && (best < 0 || before(heap_[at], heap_[best]))) best = at;
    return best;
  }

  // Restores the heap after its entry `at` has grown.
  void sink(int64_t at) {
    for (int64_t child = 2 * at + 1; child < size(); child = 2 * at + 1) {
      if (child + 1 < size() && before(heap_[child + 1], heap_[child])) ++child;
      if (!before(heap_[child], heap_[at])) return;
      std::swap(heap_[at], heap_[child]);
      at = child;
    }
  }

  Column<const int64_t> caps_;
  std::vector<int64_t> load_;
  bool enforce_;
  Order heap_;  // buckets by (load over cap, bucket)
};

// The tokens of a sequence on a node, or on a rank.
struct Share {
  int64_t sequence, bucket, tokens;
};

void put(std::vector<Share>& shares, int64_t sequence, int64_t first, const Array<int64_t>& share, Buckets& buckets) {
  for (int64_t bucket = 0; bucket < buckets.size(); ++bucket)
    if (share[bucket] != 0) shares.push_back({sequence, first + bucket, share[bucket]});
  buckets.add(share);
}

// The contents of a node: shares of sequences of the inter-node zone, and whole sequences, longest first.
struct Node {
  std::vector<Share> crossing, inside;
};

// Algorithm 1.
std::vector<Node> to_nodes(Column<const int64_t> lengths, Column<const int64_t> caps, int64_t threshold, bool enforce) {
  const Order order = ordered(lengths.size(), [&](int64_t a, int64_t b) { return lengths[a] > lengths[b]; });
  const auto size = [&](int64_t item) { return lengths[order[item]]; };
  const int64_t total = std::accumulate(lengths.begin(), lengths.end(), int64_t{0}), items = count(order);
  std::vector<Share> parts;
  Buckets split(caps, enforce);
  int64_t crossing = 0;
  while (true) {
    for (; crossing < items && size(crossing) >= threshold; ++crossing) {
      const int64_t nodes = (size(crossing) * caps.size() + total - 1) / total;
      put(parts, order[crossing], 0, split.split(size(crossing), nodes), split);
    }
    Buckets trial = split;
    const Order node = trial.whole(size, crossing, items);
    if (count(node) < items - crossing) {
      threshold = size(crossing);
      continue;
    }
    std::vector<Node> nodes(static_cast<std::size_t>(caps.size()));
    for (const Share& part : parts) nodes[part.bucket].crossing.push_back(part);
    for (int64_t item = crossing; item < items; ++item)
      nodes[node[item - crossing]].inside.push_back({order[item], node[item - crossing], size(item)});
    return nodes;
  }
}

double square(int64_t tokens) { return real(tokens) * real(tokens); }

// Algorithm 2 on the node whose ranks begin at `first`.
void to_ranks(const Node& node, int64_t first, Column<const int64_t> caps, int64_t threshold, bool enforce,
              std::vector<Share>& shares) {
  const std::vector<Share>& inside = node.inside;
  const auto size = [&](int64_t item) { return inside[item].tokens; };
  const int64_t ranks = caps.size(), items = count(inside);
  const std::size_t opening = shares.size();
  int64_t begin = 0;
  while (true) {
    while (begin < items && size(begin) >= threshold) ++begin;
    shares.resize(opening);
    Buckets buckets(caps, enforce);
    for (const Share& part : node.crossing)
      put(shares, part.sequence, first, buckets.split(part.tokens, ranks), buckets);
    double budget = 0;
    for (int64_t item = 0; item < begin; ++item) budget += square(size(item));
    budget /= real(ranks);
    int64_t turn = 0;
    for (int64_t item = 0; item < begin; ++item) {
      const auto wanted = static_cast<int64_t>(std::ceil(square(size(item)) / budget - WHOLE));
      const int64_t fragments = std::min(wanted, ranks);
      put(shares, inside[item].sequence, first, buckets.by_turns(size(item), fragments, turn), buckets);
      turn = (turn + fragments) % ranks;
    }
    const Order rank = buckets.whole(size, begin, items);
    if (count(rank) == items - begin) {
      for (int64_t item = begin; item < items; ++item)
        shares.push_back({inside[item].sequence, first + rank[item - begin], size(item)});
      return;
    }
    threshold = size(begin);
  }
}

// The blocks of sequences that are cut zig-zag over the ranks of their shares. shares: int64 [3, shares]: sequence,
// rank, tokens. A rank's first chunk has half of its share, rounded up, its second chunk the rest; neighbouring chunks
// on one rank are one block if chunks are not cut further. parts: see `Zeppelin.parts`.
std::pair<Growing<int64_t>, Growing<int64_t>> zigzag(Column<const int64_t> sequences, Matrix<const int64_t> shares,
                                                     int64_t ranks_per_node, int64_t parts) {
  Growing<int64_t> starts, home;
  const Column<const int64_t> sequence = shares[0], rank = shares[1], tokens = shares[2];
  for (int64_t low = 0, high = 0; low < sequence.size(); low = high) {
    while (high < sequence.size() && sequence[high] == sequence[low]) ++high;
    const int64_t opening = home.count();
    const int64_t size = high - low;
    const int64_t cuts = rank[low] / ranks_per_node != rank[high - 1] / ranks_per_node ? (parts + 1) / 2 : 1;
    int64_t at = sequences[sequence[low]];
    for (int64_t step = 0; step < 2 * size; ++step) {
      const int64_t index = low + std::min(step, 2 * size - 1 - step);
      const int64_t chunk = (tokens[index] + (step < size ? 1 : 0)) / 2;
      for (int64_t cut = 0; cut < cuts; ++cut) {
        const int64_t length = chunk * (cut + 1) / cuts - chunk * cut / cuts;
        if (length && (cuts > 1 || home.count() == opening || home.back() != rank[index])) {
          starts.push_back(at);
          home.push_back(rank[index]);
        }
        at += length;
      }
    }
  }
  starts.push_back(sequences[sequences.size() - 1]);
  return {std::move(starts), std::move(home)};
}

// The shares of all sequences, sorted by sequence, then by rank.
Growing<Share> find_shares(Column<const int64_t> lengths, Column<const int64_t> node_caps, Matrix<const int64_t> caps,
                           int64_t inter, int64_t intra, bool enforce) {
  Growing<Share> shares;
  const std::vector<Node> nodes = to_nodes(lengths, node_caps, inter, enforce);
  for (int64_t node = 0; node < caps.rows(); ++node)
    to_ranks(nodes[node], node * caps.columns(), caps[node], intra, enforce, shares);
  std::ranges::sort(shares, {}, [](const Share& share) { return std::tie(share.sequence, share.bucket); });
  return shares;
}

}  // namespace

static const Area area("zeppelin", [](nb::module_& m) {
  def(m, "shares(lengths, node_caps, caps, inter, intra, enforce)", find_shares);
  def(m, "blocks(sequences, shares, ranks_per_node, parts)", zigzag);
});

}  // namespace apportion
