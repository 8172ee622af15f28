// The event loop of the simulator: runs the scripts of all ranks in simulated time.
//
//   compute stream of a rank   work · a launch, once its messages are packed · a wait until a launch is complete, then
//                              the unpacking of the received messages
//   channel of a rank          carries its launches one after another: a launch is *reached* when it was launched and
//                              the one before is complete
//   transfer                   is ready when both its launches are reached; starts when both its ports are free
//   launch                     is complete when its last transfer is, one latency after the wire becomes free
//
// Events are launches, ports that become free, and completions. All events of one time are handled together: freed
// ports first choose among the transfers waiting for them, longest wait first, skipping those whose other port is busy
// (list scheduling); then the transfers that became ready start or are queued, in the order of `Traffic`. So the result
// does not depend on the order in which simultaneous events are found.
//
// With contention, a compute stream works at 1 / (1 + contention) of its speed while one or more transfers that its
// rank sends or receives are on the wire. Then the end of any work is an event too, and changes when the first transfer
// of the rank starts or the last one leaves the wire; the outdated event stays in the queue and is ignored when its
// time comes.
#include <queue>

#include "bind.hpp"
#include "planner/simulate_ports.hpp"

namespace apportion {

namespace {

constexpr int64_t NONE = Ports::NONE;
constexpr double NOT_YET = -1;

enum Role : uint8_t { WORK, LAUNCH, WAIT };

// `Script` of apportion/planner/simulate/program.py.
struct Script {
  Column<const int64_t> ptr;
  Column<const uint8_t> role;
  Column<const double> work_us, end_us;
  Column<const int64_t> launch, rank, round, channel, before, after, end_ptr, ends;
};

// `Traffic` of apportion/planner/simulate/program.py.
struct Traffic {
  Column<const int64_t> sender, receiver, out_port, in_port;
  Column<const double> wire_us, latency_us;
  Column<const int64_t> bytes, tensor;
};

struct Event {
  enum Kind { LAUNCHED, FREED, COMPLETE, WORKED };
  double time;
  Kind kind;
  int64_t item;  // an instruction, a transfer, a launch or a rank

  bool operator>(const Event& other) const {
    if (time != other.time) return time > other.time;
    return kind != other.kind ? kind > other.kind : item > other.item;
  }
};

// A rank's compute stream: its time, its current instruction, and the launch for which it waits.
struct Stream {
  double clock = 0;
  int64_t cursor = 0, blocked = NONE;
  // With contention: the work of the current instruction, as time at full speed, left at `since`, which may be in the
  // future; its currently expected end, NOT_YET if idle; and the number of the rank's transfers on the wire.
  double left = 0, since = 0, due = NOT_YET;
  int64_t wires = 0;
};

struct Launch {
  int64_t open = 0;  // the number of transfers not yet started
  bool launched = false, settled = false;
};

class Engine {
 public:
  Engine(const Script& script, const Traffic& traffic, int64_t ports, double contention)
      : script_(script), traffic_(traffic), contention_(contention), ports_(traffic.out_port, traffic.in_port, ports) {
    for (int64_t rank = 0; rank < streams_.size(); ++rank) streams_[rank].cursor = script.ptr[rank];
    for (int64_t launch = 0; launch < launches_.size(); ++launch)
      launches_[launch].open = script.end_ptr[launch + 1] - script.end_ptr[launch];
  }

  // The times; the end of each stream; and the launch that blocks it, or NONE.
  auto run() {
    for (int64_t rank = 0; rank < streams_.size(); ++rank) advance(rank);
    while (!events_.empty()) {
      now_ = events_.top().time;
      fresh_.clear();
      freed_.clear();
      while (!events_.empty() && events_.top().time == now_) {
        const Event event = events_.top();
        events_.pop();
        handle(event);
      }
      restart_ports();
      std::sort(fresh_.begin(), fresh_.end());
      for (const int64_t transfer : fresh_) {
        ready_[transfer] = now_;
        ports_.can_start(transfer) ? start(transfer) : ports_.enqueue(transfer);
      }
    }
    Array<double> clock(streams_.size());
    Array<int64_t> blocked(streams_.size());
    std::ranges::transform(streams_, clock.begin(), &Stream::clock);
    std::ranges::transform(streams_, blocked.begin(), &Stream::blocked);
    return moved(begin_, end_, reached_, done_, ready_, start_, last_, cause_, clock, blocked);
  }

 private:
  void handle(const Event& event) {
    switch (event.kind) {
      case Event::LAUNCHED:
        return launch(event.item);
      case Event::FREED:
        freed_.push_back(traffic_.out_port[event.item]);
        freed_.push_back(traffic_.in_port[event.item]);
        return count_wire(event.item, -1);
      case Event::COMPLETE:
        return settle(event.item);
      case Event::WORKED:
        return end_work(event.item);
    }
  }

  bool slows() const { return contention_ > 0; }

  // Runs a rank's compute stream up to its next launch, or to a wait for a launch whose completion is not known yet;
  // with contention, up to the next work, whose end is an event.
  void advance(int64_t rank) {
    Stream& stream = streams_[rank];
    const int64_t end = script_.ptr[rank + 1];
    double clock = stream.clock, work = 0;
    int64_t at = stream.cursor;
    for (; at < end; ++at) {
      begin_[at] = clock;
      if (script_.role[at] == WAIT) {
        const int64_t awaited = script_.launch[at];
        if (launches_[awaited].open > 0 || done_[awaited] < 0) {
          stream.blocked = awaited;
          break;
        }
        clock = std::max(clock, done_[awaited]);
      }
      work = script_.work_us[at];
      if (slows() && work > 0) break;
      clock += work;
      end_[at] = clock;
      if (script_.role[at] == LAUNCH) {
        events_.push({clock, Event::LAUNCHED, at});
        break;
      }
    }
    if (at == end) {
      work = script_.end_us[rank];
      if (!slows()) clock += work;
    }
    stream.clock = clock;
    stream.cursor = at;
    if (slows() && work > 0) {
      stream.left = work;
      stream.since = clock;
      expect(rank);
    }
  }

  // Computes the currently expected end of the work of a rank's compute stream, and adds its event.
  void expect(int64_t rank) {
    Stream& stream = streams_[rank];
    const double slow = stream.wires > 0 ? 1 + contention_ : 1;
    stream.due = stream.since + stream.left * slow;
    events_.push({stream.due, Event::WORKED, rank});
  }

  // Ends the work of a compute stream, unless its end has changed meanwhile.
  void end_work(int64_t rank) {
    Stream& stream = streams_[rank];
    if (stream.due != now_) return;
    const int64_t at = stream.cursor;
    stream.clock = now_;
    stream.due = NOT_YET;
    if (at == script_.ptr[rank + 1]) return;
    end_[at] = now_;
    if (script_.role[at] == LAUNCH) {
      events_.push({now_, Event::LAUNCHED, at});
      return;
    }
    stream.cursor = at + 1;
    advance(rank);
  }

  // Counts a transfer that starts (1) or ends (-1): with contention, this changes when its ranks' work ends.
  void count_wire(int64_t transfer, int64_t change) {
    if (!slows()) return;
    for (const int64_t launch : {traffic_.sender[transfer], traffic_.receiver[transfer]}) {
      const int64_t rank = script_.rank[launch];
      Stream& stream = streams_[rank];
      const bool before = stream.wires > 0;
      stream.wires += change;
      if ((stream.wires > 0) == before || stream.due <= now_) continue;
      if (now_ > stream.since) {
        const double done = (now_ - stream.since) / (before ? 1 + contention_ : 1);
        stream.left = std::max(stream.left - done, 0.0);
        stream.since = now_;
      }
      expect(rank);
    }
  }

  void launch(int64_t at) {
    const int64_t launch = script_.launch[at], before = script_.before[launch], rank = script_.rank[launch];
    launches_[launch].launched = true;
    if (before < 0 || launches_[before].settled) reach(launch);
    streams_[rank].cursor = at + 1;
    advance(rank);
  }

  // The channel reaches a launch; one without transfers is complete at once, and the next one follows.
  void reach(int64_t launch) {
    for (; launch >= 0 && launches_[launch].launched; launch = script_.after[launch]) {
      reached_[launch] = now_;
      for (int64_t end = script_.end_ptr[launch]; end < script_.end_ptr[launch + 1]; ++end) {
        const int64_t transfer = script_.ends[end];
        if (++sides_[transfer] == 2) fresh_.push_back(transfer);
      }
      if (launches_[launch].open > 0) return;
      done_[launch] = now_;
      launches_[launch].settled = true;
      wake(launch);
    }
  }

  // A launch is complete: the channel reaches the next one, if it was launched.
  void settle(int64_t launch) {
    launches_[launch].settled = true;
    reach(script_.after[launch]);
  }

  // Each freed port takes the first transfer of its queue that can start.
  void restart_ports() {
    std::sort(freed_.begin(), freed_.end());
    for (const int64_t port : freed_) ports_.release(port);
    for (const int64_t port : freed_) {
      if (!ports_.is_free_and_awaited(port)) continue;
      const int64_t transfer = ports_.first_startable(ready_, port);
      if (transfer < 0) continue;
      cause_[transfer] = ports_.last_transfer(port);
      ports_.dequeue(transfer);
      start(transfer);
    }
  }

  // Starts a transfer. Waiting streams continue once the completion of their launch is known.
  void start(int64_t transfer) {
    start_[transfer] = now_;
    ports_.occupy(transfer);
    const double free = now_ + traffic_.wire_us[transfer], complete = free + traffic_.latency_us[transfer];
    events_.push({free, Event::FREED, transfer});
    count_wire(transfer, 1);
    for (const int64_t launch : {traffic_.sender[transfer], traffic_.receiver[transfer]}) {
      if (complete > done_[launch]) {
        done_[launch] = complete;
        last_[launch] = transfer;
      }
      if (--launches_[launch].open == 0) {
        events_.push({done_[launch], Event::COMPLETE, launch});
        wake(launch);
      }
    }
  }

  // The time of a launch's completion is known: its rank continues if it waits for this launch.
  void wake(int64_t launch) {
    const int64_t rank = script_.rank[launch];
    if (streams_[rank].blocked != launch) return;
    streams_[rank].blocked = NONE;
    advance(rank);
  }

  const Script script_;
  const Traffic traffic_;
  // `Times` of apportion/planner/simulate/engine.py; NOT_YET for anything that never happened
  Array<double> begin_{script_.role.size(), NOT_YET}, end_{begin_.size(), NOT_YET};    // of instructions
  // of launches: when the channel reached it, and when it was complete
  Array<double> reached_{script_.rank.size(), NOT_YET}, done_{reached_.size(), NOT_YET};
  Array<double> ready_{traffic_.sender.size(), NOT_YET}, start_{ready_.size(), NOT_YET};  // of transfers
  Array<int64_t> last_{reached_.size(), NONE};  // of launches: the transfer that was completed last
  Array<int64_t> cause_{ready_.size(), NONE};   // of transfers: the one that freed the port that it had waited for
  const double contention_;
  Ports ports_;
  Array<Stream> streams_{script_.ptr.size() - 1};
  Array<Launch> launches_{reached_.size()};
  Array<uint8_t> sides_{ready_.size()};  // for each transfer, how many of its two launches were reached
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  double now_ = 0;
  std::vector<int64_t> fresh_, freed_;  // transfers that became ready, and ports that became free, at this time
};

}  // namespace

static const Area area("simulate", [](nb::module_& m) {
  m.attr("NONE") = NONE;
  m.attr("NOT_YET") = NOT_YET;
  def(m, "run(script, traffic, ports, contention)",
      +[](const Script& script, const Traffic& traffic, int64_t ports, double contention) {
        return Engine(script, traffic, ports, contention).run();
      });
});

}  // namespace apportion
