// Ports of the simulated network and their queues.
//
// A port carries one transfer at a time. A waiting transfer is in three queues, each in the order in which the
// transfers became ready (ties by number): the queues of its out port, of its in port, and of the pair. A
// port that becomes free takes the first transfer of its queue whose other port is free. When the queue is long, as in
// a large all-to-all, almost all other ports are busy, and it is faster to look at the few free ports and the first
// transfer of each pair (1 s instead of 16 s with 512 ranks and unequal sizes). Both ways find the same transfer.
#pragma once

#include "ir/sorting.hpp"

namespace apportion {

class Ports {
 public:
  static constexpr int64_t NONE = -1;

  // out, in: the ports of each transfer, in [0, count).
  Ports(Column<const int64_t> out, Column<const int64_t> in, int64_t count)
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

  // Whether both ports of a transfer are free.
  bool can_start(int64_t transfer) const { return is_free(out_[transfer]) && is_free(in_[transfer]); }
  // Marks both ports as used by the transfer.
  void occupy(int64_t transfer) {
    for (const int64_t port : {out_[transfer], in_[transfer]}) {
      ports_[port].user = transfer;
      if (ports_[port].place >= 0) drop_idle(port);
    }
  }
  // Marks the port as free.
  void release(int64_t port) {
    ports_[port].user = -2 - ports_[port].user;
    if (ports_[port].waiting > 0) add_idle(port);
  }
  // The last transfer that used a free port, NONE before the first.
  int64_t last_transfer(int64_t port) const { return -2 - ports_[port].user; }
  bool is_free_and_awaited(int64_t port) const { return is_free(port) && ports_[port].waiting > 0; }
  // Adds a transfer that cannot start to the queues, or removes one that has started.
  void enqueue(int64_t transfer) {
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
  void dequeue(int64_t transfer) {
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
  // The first transfer in a free port's queue whose other port is free, or NONE. ready: the ready time of each
  // transfer.
  int64_t first_startable(Column<const double> ready, int64_t port) const {
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

 private:
  // The number of transfers of a queue that are examined before the free ports are searched instead.
  static constexpr int64_t WALK = 16;

  enum Side { OUT, IN, PAIR };
  struct Port {
    int64_t user = NONE;  // the transfer on the wire; for a free port, -2 minus its last transfer
    int64_t waiting = 0;  // the number of transfers in its queue
    int64_t place = NONE;  // its position in `idle_`
    Side side = OUT;
  };
  struct Queue {
    int64_t head = NONE, tail = NONE;
  };
  struct Neighbours {
    int64_t before = NONE, after = NONE;
  };

  bool is_free(int64_t port) const { return ports_[port].user < 0; }
  std::array<int64_t, 3> queues_of(int64_t transfer) const {
    return {out_[transfer], in_[transfer], ports_.size() + pair_[transfer]};
  }
  int64_t first_of_idle(Column<const double> ready, int64_t port) const {
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
  void add_idle(int64_t port) {
    auto& idle = idle_[ports_[port].side];
    ports_[port].place = static_cast<int64_t>(idle.size());
    idle.push_back(port);
  }
  // The last idle port takes the place of the dropped one.
  void drop_idle(int64_t port) {
    auto& idle = idle_[ports_[port].side];
    const int64_t last = idle.back();
    idle[static_cast<std::size_t>(ports_[port].place)] = last;
    idle.pop_back();
    ports_[last].place = ports_[port].place;
    ports_[port].place = NONE;
  }

  Column<const int64_t> out_, in_;
  Array<Port> ports_;
  std::vector<int64_t> pair_keys_;  // out port * ports + in port, ascending
  Array<int64_t> pair_;           // for each transfer, its index in `pair_keys_`
  Array<Queue> queues_;                // those of ports, then those of pairs
  Array<std::array<Neighbours, 3>> in_queue_;  // for each transfer, by side
  std::array<std::vector<int64_t>, 2> idle_;  // the free ports of each side with waiting transfers
};

}  // namespace apportion
