#include "planner/simulate_ports.hpp"

#include "ir/sorting.hpp"

namespace apportion {

using std::int64_t;

// The number of transfers of a queue that are examined before the free ports are searched instead.
static constexpr int64_t WALK = 16;

Ports::Ports(Column<const int64_t> out, Column<const int64_t> in, int64_t count)
    : out_(out), in_(in), ports_(count), pair_(out.size()), in_queue_(out.size()) {
  for (const int64_t port : in) ports_[port].side = IN;
  Array<int64_t> keys(out.size()), order(out.size());
  for (int64_t transfer = 0; transfer < out.size(); ++transfer) keys[transfer] = out[transfer] * count + in[transfer];
  stable_order(keys, order);
  for (const int64_t transfer : order) {
    if (pair_keys_.empty() || pair_keys_.back() != keys[transfer]) pair_keys_.push_back(keys[transfer]);
    pair_[transfer] = static_cast<int64_t>(pair_keys_.size()) - 1;
  }
  queues_ = Array<Queue>(count + static_cast<int64_t>(pair_keys_.size()));
}

void Ports::occupy(int64_t transfer) {
  for (const int64_t port : {out_[transfer], in_[transfer]}) {
    ports_[port].user = transfer;
    if (ports_[port].place >= 0) drop_idle(port);
  }
}

void Ports::release(int64_t port) {
  ports_[port].user = -2 - ports_[port].user;
  if (ports_[port].waiting > 0) add_idle(port);
}

void Ports::enqueue(int64_t transfer) {
  const auto queues = queues_of(transfer);
  for (std::size_t side = 0; side < queues.size(); ++side) {
    Queue& queue = queues_[queues[side]];
    in_queue_[transfer][side].before = queue.tail;
    (queue.tail < 0 ? queue.head : in_queue_[queue.tail][side].after) = transfer;
    queue.tail = transfer;
  }
  for (const int64_t port : {out_[transfer], in_[transfer]}) {
    ++ports_[port].waiting;
    if (is_free(port) && ports_[port].place < 0) add_idle(port);
  }
}

void Ports::dequeue(int64_t transfer) {
  const auto queues = queues_of(transfer);
  for (std::size_t side = 0; side < queues.size(); ++side) {
    Queue& queue = queues_[queues[side]];
    const auto [before, after] = in_queue_[transfer][side];
    (before < 0 ? queue.head : in_queue_[before][side].after) = after;
    (after < 0 ? queue.tail : in_queue_[after][side].before) = before;
  }
  --ports_[out_[transfer]].waiting;
  --ports_[in_[transfer]].waiting;
}

int64_t Ports::first_startable(Column<const double> ready, int64_t port) const {
  const Side side = ports_[port].side;
  const auto& others = idle_[1 - side];
  int64_t steps = 0;
  for (int64_t transfer = queues_[port].head; transfer >= 0; transfer = in_queue_[transfer][side].after) {
    if (is_free(side == OUT ? in_[transfer] : out_[transfer])) return transfer;
    const bool is_long = steps++ == WALK && static_cast<int64_t>(others.size()) < ports_[port].waiting;
    if (is_long) return first_of_idle(ready, port);
  }
  return NONE;
}

int64_t Ports::first_of_idle(Column<const double> ready, int64_t port) const {
  const Side side = ports_[port].side;
  int64_t best = NONE;
  for (const int64_t other : idle_[1 - side]) {
    const int64_t key = side == OUT ? port * ports_.size() + other : other * ports_.size() + port;
    const auto match = std::lower_bound(pair_keys_.begin(), pair_keys_.end(), key);
    if (match == pair_keys_.end() || *match != key) continue;
    const int64_t first = queues_[ports_.size() + (match - pair_keys_.begin())].head;
    if (first < 0) continue;
    if (best < 0 || ready[first] < ready[best] || (ready[first] == ready[best] && first < best)) best = first;
  }
  return best;
}

void Ports::add_idle(int64_t port) {
  auto& idle = idle_[ports_[port].side];
  ports_[port].place = static_cast<int64_t>(idle.size());
  idle.push_back(port);
}

// The last idle port takes the place of the dropped one.
void Ports::drop_idle(int64_t port) {
  auto& idle = idle_[ports_[port].side];
  const int64_t last = idle.back();
  idle[static_cast<std::size_t>(ports_[port].place)] = last;
  idle.pop_back();
  ports_[last].place = ports_[port].place;
  ports_[port].place = NONE;
}

}  // namespace apportion
