// Ports of the simulated network and their queues.
//
// A port carries one transfer at a time. A waiting transfer is in three queues, each in the order in which the
// transfers became ready (ties by number): the queues of its out port, of its in port, and of the pair. A
// port that becomes free takes the first transfer of its queue whose other port is free. When the queue is long, as in
// a large all-to-all, almost all other ports are busy, and it is faster to look at the few free ports and the first
// transfer of each pair (1 s instead of 16 s with 512 ranks and unequal sizes). Both ways find the same transfer.
#pragma once

#include <array>
#include <vector>

#include "owned.hpp"

namespace apportion {

class Ports {
 public:
  static constexpr std::int64_t NONE = -1;

  // out, in: the ports of each transfer, in [0, count).
  Ports(Column<const std::int64_t> out, Column<const std::int64_t> in, std::int64_t count);

  // Whether both ports of a transfer are free.
  bool can_start(std::int64_t transfer) const { return is_free(out_[transfer]) && is_free(in_[transfer]); }
  // Marks both ports as used by the transfer.
  void occupy(std::int64_t transfer);
  // Marks the port as free.
  void release(std::int64_t port);
  // The last transfer that used a free port, NONE before the first.
  std::int64_t last_transfer(std::int64_t port) const { return -2 - ports_[port].user; }
  bool is_free_and_awaited(std::int64_t port) const { return is_free(port) && ports_[port].waiting > 0; }
  // Adds a transfer that cannot start to the queues, or removes one that has started.
  void enqueue(std::int64_t transfer);
  void dequeue(std::int64_t transfer);
  // The first transfer in a free port's queue whose other port is free, or NONE. ready: the ready time of each
  // transfer.
  std::int64_t first_startable(Column<const double> ready, std::int64_t port) const;

 private:
  enum Side { OUT, IN, PAIR };
  struct Port {
    std::int64_t user = NONE;  // the transfer on the wire; for a free port, -2 minus its last transfer
    std::int64_t waiting = 0;  // the number of transfers in its queue
    std::int64_t place = NONE;  // its position in `idle_`
    Side side = OUT;
  };
  struct Queue {
    std::int64_t head = NONE, tail = NONE;
  };
  struct Neighbours {
    std::int64_t before = NONE, after = NONE;
  };

  bool is_free(std::int64_t port) const { return ports_[port].user < 0; }
  std::array<std::int64_t, 3> queues_of(std::int64_t transfer) const {
    return {out_[transfer], in_[transfer], ports_.size() + pair_[transfer]};
  }
  std::int64_t first_of_idle(Column<const double> ready, std::int64_t port) const;
  void add_idle(std::int64_t port);
  void drop_idle(std::int64_t port);

  Column<const std::int64_t> out_, in_;
  Array<Port> ports_;
  std::vector<std::int64_t> pair_keys_;  // out port * ports + in port, ascending
  Array<std::int64_t> pair_;           // for each transfer, its index in `pair_keys_`
  Array<Queue> queues_;                // those of ports, then those of pairs
  Array<std::array<Neighbours, 3>> in_queue_;  // for each transfer, by side
  std::array<std::vector<std::int64_t>, 2> idle_;  // the free ports of each side with waiting transfers
};

}  // namespace apportion
