// `blend`: each rank in turn takes the densest and the sparsest remaining rows; then ranks exchange rows.
//
// Narrow documents, which one rank can compute, are sorted by density; wide documents come after them. A rank takes x
// tokens of dense rows and the rest of its tokens of sparse rows, where x gives it its target of pairs.
//
//     narrow  │ sparse ──►  · · · · ·  ◄── dense │   wide  │ ──► heads · · · tails ◄── │
//
//     dense   the rest of an unfinished document (the stack); else the ends of the last wide document, until its rest
//             is no longer dense; else narrow documents from the end, and the tail of the last one taken
//     sparse  rests that are no longer dense (the queue); then narrow documents from the front, and the head of the
//             last one taken; if there are none, heads of wide documents
//
// A rank leaves at most three documents unfinished, so there are O(documents + ranks) pieces; each x is found by
// bisection. Exchanges of equally many dense and sparse rows between two ranks reduce the remaining imbalance.

#include "bind.hpp"
#include "planner/numbers.hpp"

namespace apportion {

namespace {

constexpr double FLAT = 0.25;  // excess of the second half's pairs, relative to all, above which shares include heads
constexpr int64_t SPARE = 16;  // pieces added per rank by exchanges
constexpr int64_t MAX_CANDIDATES = 32;  // pieces of a rank that are considered for an exchange
constexpr int64_t EXCHANGES = 8;   // maximum exchanges per rank

// The number of pairs up to any row: `Profile` of apportion/ir/masks/profile.py.
struct Profile {
  Column<const int64_t> start, value, slope, below;

  int64_t upto(int64_t row) const {
    const int64_t i = std::upper_bound(start.begin(), start.end(), row) - start.begin() - 1, n = row - start[i];
    return below[i] + value[i] * n + slope[i] * (n * (n - 1) / 2);
  }
  int64_t between(int64_t low, int64_t high) const { return upto(high) - upto(low); }
};

// Rows [low, high) of a rank.
struct Piece {
  int64_t low, high, rank;
};

// The rest of a document. head: the fraction of each share that comes from the document's head.
struct Document {
  int64_t low, high;
  double head;
  int64_t size() const { return high - low; }
};

class Walk {
 public:
  Growing<Piece> pieces;

  // widest: the number of pairs that one rank can compute.
  Walk(Column<const int64_t> documents, const Profile& rows, double widest, double head)
      : rows_(rows), ends_(1), work_(1) {
    struct Entry {
      Document document;
      int64_t pairs;
      double density;
      bool wide;
    };
    std::vector<Entry> entries;
    for (int64_t i = 0; i + 1 < documents.size(); ++i) {
      const int64_t low = documents[i], high = documents[i + 1];
      const int64_t pairs = rows.between(low, high), first = rows.between(low, low + (high - low) / 2);
      const bool rising = real(pairs - 2 * first) > FLAT * real(pairs);
      entries.push_back({{low, high, rising ? head : 0}, pairs, real(pairs) / real(high - low), real(pairs) > widest});
    }
    std::stable_sort(entries.begin(), entries.end(), [](const Entry& entry, const Entry& other) {
      return entry.wide != other.wide ? other.wide : entry.density < other.density;
    });
    for (const Entry& entry : entries) {
      left_.push_back(entry.document);
      ends_.push_back(ends_.back() + entry.document.size());
      work_.push_back(work_.back() + entry.pairs);
      heads_ += !entry.wide;
    }
    dense_ = heads_ - 1;
    tails_ = count(entries) - 1;
  }

  // Fills all ranks; later ranks compensate for the excess or deficit of earlier ones.
  void run(Column<const int64_t> tokens, Column<const double> speeds) {
    int64_t work = work_.back();
    double speed = std::accumulate(speeds.begin(), speeds.end(), 0.0);
    for (int64_t rank = 0; rank < tokens.size(); ++rank) {
      const int64_t first = count(pieces);
      rank_ = rank;
      fill(tokens[rank], real(work) * (speeds[rank] / speed));
      for (int64_t piece = first; piece < count(pieces); ++piece)
        work -= rows_.between(pieces[piece].low, pieces[piece].high);
      speed -= speeds[rank];
    }
  }

 private:
  // Takes pieces for the current rank: `tokens` tokens with about `target` pairs.
  void fill(int64_t tokens, double target) {
    unburden(tokens, target);
    while (tokens > 0 && has_ends()) {
      const bool is_begun = !stack_.empty();
      const int64_t doc = next_ends(), size = left_[doc].size(), limit = std::min(tokens, size);
      if (real(mixed(doc, tokens, limit)) > target) {
        const int64_t x = share(doc, tokens, target, limit);
        take_ends(doc, x);
        take_sparse(tokens - x);
        return;
      }
      if (is_begun)
        stack_.pop_back();
      else
        --tails_;
      const double remaining = target - real(rows_.between(left_[doc].low, left_[doc].high));
      if (size > tokens || real(max_pairs(tokens - size)) < remaining) {
        queue_.push_back(doc);
        continue;
      }
      take_ends(doc, size);
      tokens -= size;
      target = remaining;
      if (!is_begun && real(mixed(NARROW, tokens, narrow(tokens))) >= target) break;
    }
    const int64_t x = share(NARROW, tokens, target, narrow(tokens));
    take_dense(x);
    take_sparse(tokens - x);
  }

  // Makes unfinished sparse rests dense while even the sparsest `tokens` tokens have more pairs than the target.
  void unburden(int64_t tokens, double target) {
    while (real(sparse(tokens)) >= target + 1) {
      if (queued_ < count(queue_)) {
        stack_.push_back(queue_[queued_++]);
      } else if (sparse_ <= dense_ && left_[sparse_].size() < ends_[sparse_ + 1] - ends_[sparse_]) {
        stack_.push_back(sparse_++);
      } else {
        return;
      }
    }
  }

  // ---- evaluation

  static constexpr int64_t NARROW = -1;  // stands for narrow documents rather than one document's ends

  bool has_ends() const { return !stack_.empty() || heads_ <= tails_; }
  int64_t next_ends() const { return stack_.empty() ? tails_ : stack_.back(); }

  // The largest number of pairs of `tokens` tokens.
  int64_t max_pairs(int64_t tokens) const {
    const int64_t pairs = mixed(NARROW, tokens, narrow(tokens));
    if (!has_ends()) return pairs;
    return std::max(pairs, mixed(next_ends(), tokens, std::min(tokens, left_[next_ends()].size())));
  }

  // The number of dense tokens, at most `high`, that gives `target` pairs. By bisection, since pairs increase with that
  // number, at least near the end.
  int64_t share(int64_t doc, int64_t tokens, double target, int64_t high) const {
    if (real(mixed(doc, tokens, high)) <= target) return high;
    return bisect(0, high, [&](int64_t x) { return real(mixed(doc, tokens, x)) <= target; });
  }

  // The pairs of `tokens` tokens, x of them dense.
  int64_t mixed(int64_t doc, int64_t tokens, int64_t x) const {
    return sparse(tokens - x) + (doc == NARROW ? dense(x) : ends(doc, x));
  }

  // How many of a share's tokens come from the document's head.
  int64_t head_of(int64_t doc, int64_t tokens) const { return static_cast<int64_t>(real(tokens) * left_[doc].head); }

  // The pairs of `tokens` tokens from a document's head and tail.
  int64_t ends(int64_t doc, int64_t tokens) const {
    const Document& rest = left_[doc];
    const int64_t head = head_of(doc, tokens);
    return rows_.between(rest.low, rest.low + head) + rows_.between(rest.high - tokens + head, rest.high);
  }

  // The pairs of the last `tokens` tokens of narrow documents: whole documents and the tail of the one before them.
  int64_t dense(int64_t tokens) const {
    if (tokens <= 0 || dense_ < sparse_) return 0;
    const int64_t down = ends_[dense_ + 1] - tokens, start = first_from(sparse_ + 1, dense_ + 1, down);
    const int64_t high = left_[start - 1].high, rest = ends_[start] - down;
    return work_[dense_ + 1] - work_[start] + rows_.between(high - rest, high);
  }

  // The pairs of the sparsest `tokens` tokens.
  int64_t sparse(int64_t tokens) const {
    int64_t pairs = 0;
    const auto add_head = [&](int64_t doc) {
      const Document& rest = left_[doc];
      const int64_t part = std::max<int64_t>(0, std::min(tokens, rest.size()));
      pairs += rows_.between(rest.low, rest.low + part);
      tokens -= part;
    };
    for (int64_t place = queued_; place < count(queue_) && tokens > 0; ++place) add_head(queue_[place]);
    if (tokens > 0 && sparse_ <= dense_) {
      add_head(sparse_);
      const int64_t upto = ends_[sparse_ + 1] + tokens;
      const int64_t stop = first_from(sparse_ + 1, dense_ + 2, upto + 1) - 1;  // documents before it are whole
      pairs += work_[stop] - work_[sparse_ + 1];
      tokens = upto - ends_[stop];
      if (stop <= dense_) add_head(stop);
    }
    for (int64_t doc = heads_; doc <= tails_ && tokens > 0; ++doc) add_head(doc);
    for (auto doc = stack_.rbegin(); doc != stack_.rend() && tokens > 0; ++doc) add_head(*doc);
    return pairs;
  }

  // The first of documents [low, high) with at least `tokens` tokens before it; high if there is none.
  int64_t first_from(int64_t low, int64_t high, int64_t tokens) const {
    return std::lower_bound(ends_.begin() + low, ends_.begin() + std::max(low, high), tokens) - ends_.begin();
  }

  // The number of tokens left in narrow documents, at most `limit`.
  int64_t narrow(int64_t limit) const {
    if (sparse_ > dense_) return 0;
    return std::min(left_[sparse_].size() + ends_[dense_ + 1] - ends_[sparse_ + 1], limit);
  }

  // ---- assignment

  void take(int64_t low, int64_t high) {
    if (low < high) pieces.push_back({low, high, rank_});
  }

  void take_ends(int64_t doc, int64_t tokens) {
    Document& rest = left_[doc];
    const Document whole = rest;
    const int64_t head = head_of(doc, tokens);
    rest.low += head;
    rest.high -= tokens - head;
    take(whole.low, rest.low);
    take(rest.high, whole.high);
  }

  // Takes the tokens that `dense` counts.
  void take_dense(int64_t tokens) {
    while (tokens > 0) {
      const int64_t doc = dense_--;
      Document& rest = left_[doc];
      const int64_t part = std::min(tokens, rest.size());
      rest.high -= part;
      take(rest.high, rest.high + part);
      tokens -= part;
      if (rest.size() > 0) stack_.push_back(doc);
    }
  }

  // Takes the tokens that `sparse` counts.
  void take_sparse(int64_t tokens) {
    while (tokens > 0) {
      int64_t* cursor = queued_ < count(queue_) ? &queued_
                        : sparse_ <= dense_     ? &sparse_
                        : heads_ <= tails_      ? &heads_
                                                : nullptr;
      Document& rest = left_[cursor == nullptr ? stack_.back() : cursor == &queued_ ? queue_[queued_] : *cursor];
      const int64_t part = std::min(tokens, rest.size());
      take(rest.low, rest.low + part);
      rest.low += part;
      tokens -= part;
      if (rest.size() > 0) continue;
      if (cursor == nullptr)
        stack_.pop_back();
      else
        ++*cursor;
    }
  }

  Profile rows_;
  std::vector<Document> left_;          // the rests of documents: narrow ones first, by density
  std::vector<int64_t> ends_, work_;    // for each document, tokens and pairs of all documents before it
  std::vector<int64_t> queue_, stack_;  // rests that precede all other sparse (queue) or dense (stack) rows
  int64_t sparse_ = 0, dense_ = 0;      // the first and last narrow document left
  int64_t heads_ = 0, tails_ = 0;       // the first and last wide document left
  int64_t queued_ = 0;                  // the next entry of the queue
  int64_t rank_ = 0;                    // the current rank
};

// Exchanges rows between ranks; each exchange adds at most two pieces.
class Repair {
 public:
  Repair(const Profile& rows, Growing<Piece>& pieces, Column<const double> wanted) : rows_(rows), pieces_(pieces) {
    for (const double pairs : wanted) {
      over_.push_back(-pairs);
      scale_.push_back(std::max(pairs, 1.0));
    }
    for (const Piece& piece : pieces) over_[piece.rank] += real(rows.between(piece.low, piece.high));
  }

  // Exchanges rows until no rank is more than `tolerance` (a fraction) above its target, there are `room` pieces, or no
  // exchange helps.
  void run(double tolerance, int64_t room) {
    std::vector<double> share(over_.size());
    for (int64_t turn = 0; turn < EXCHANGES * count(over_); ++turn) {
      std::transform(over_.begin(), over_.end(), scale_.begin(), share.begin(), std::divides<>());
      const int64_t busy = std::max_element(share.begin(), share.end()) - share.begin();
      const int64_t idle = std::min_element(share.begin(), share.end()) - share.begin();
      if (over_[busy] <= tolerance * scale_[busy] || count(pieces_) + 2 > room) return;
      const Exchange exchange = best(busy, idle, std::min(over_[busy], -over_[idle]));
      if (exchange.rows == 0) return;
      const double moved = real(gain(exchange));
      if (moved < tolerance / 2 * scale_[busy]) return;
      swap(exchange);
      over_[busy] -= moved;
      over_[idle] += moved;
    }
  }

 private:
  // An exchange of the last rows of one piece for the first rows of another.
  struct Exchange {
    int64_t first = 0, second = 0, rows = 0;
  };

  // The exchange with the fewest rows that moves `goal` pairs; if none does, the one that moves the most pairs.
  Exchange best(int64_t busy, int64_t idle, double goal) const {
    Exchange best;
    bool is_enough = false;
    double largest = 0;
    const std::vector<int64_t> candidates = pieces_of(idle);
    for (const int64_t first : pieces_of(busy)) {
      for (const int64_t second : candidates) {
        const Piece &a = pieces_[first], &b = pieces_[second];
        Exchange trial{first, second, std::min(a.high - a.low, b.high - b.low)};
        const double moved = real(gain(trial));
        if (moved >= goal) {
          trial.rows = fewest_rows(trial, goal);
          if (!is_enough || trial.rows < best.rows) best = trial;
          is_enough = true;
        } else if (!is_enough && moved > largest) {
          best = trial;
          largest = moved;
        }
      }
    }
    return best;
  }

  std::vector<int64_t> pieces_of(int64_t rank) const {
    std::vector<int64_t> numbers;
    for (int64_t piece = 0; piece < count(pieces_) && count(numbers) < MAX_CANDIDATES; ++piece)
      if (pieces_[piece].rank == rank) numbers.push_back(piece);
    return numbers;
  }

  // The number of pairs that leave the busy rank.
  int64_t gain(const Exchange& exchange) const {
    const int64_t end = pieces_[exchange.first].high, begin = pieces_[exchange.second].low;
    return rows_.between(end - exchange.rows, end) - rows_.between(begin, begin + exchange.rows);
  }

  // The smallest number of rows with which the exchange moves `goal` pairs.
  int64_t fewest_rows(const Exchange& exchange, double goal) const {
    const auto is_less = [&](int64_t rows) { return real(gain({exchange.first, exchange.second, rows})) < goal; };
    return bisect(0, exchange.rows, is_less) + 1;
  }

  void swap(const Exchange& exchange) {
    const Piece first = pieces_[exchange.first], second = pieces_[exchange.second];
    const int64_t cut = first.high - exchange.rows, upto = second.low + exchange.rows;
    pieces_[exchange.first] = {cut, first.high, second.rank};
    pieces_[exchange.second] = {second.low, upto, first.rank};
    if (first.low < cut) pieces_.push_back({first.low, cut, first.rank});
    if (upto < second.high) pieces_.push_back({upto, second.high, second.rank});
  }

  Profile rows_;
  Growing<Piece>& pieces_;
  std::vector<double> over_, scale_;  // for each rank, its pairs above its target, and the target (at least 1)
};

Growing<Piece> mix(Column<const int64_t> documents, const Profile& rows, Column<const int64_t> tokens,
                   Column<const double> speeds, Column<const double> wanted, double widest, double head,
                   double tolerance) {
  Walk walk(documents, rows, widest, head);
  walk.run(tokens, speeds);
  Repair(rows, walk.pieces, wanted).run(tolerance, documents.size() - 1 + SPARE * tokens.size());
  return std::move(walk.pieces);
}

}  // namespace

static const Area area("blend", [](nb::module_& m) {
  def(m, "mix(documents, rows, tokens, speeds, wanted, widest, head, tolerance)", mix);
});

}  // namespace apportion
