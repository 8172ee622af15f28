"""The event loop: all ranks' scripts against time.

    compute stream of a rank   work · launch, once its messages are packed · wait, until the launch is complete, and
                               then the unpacking of what it brought
    channel of a rank          its launches one after another: *reached* when launched and the one before is complete
    transfer                   ready when both its launches are reached; starts when both its ports are free
    launch                     complete when its last transfer is: latency after the wire is free

Events are launches, ports that become free, and completions. All that happens at one time is taken together: freed
ports first choose among those that wait for them, the longest waiting first, skipping those whose other port is busy
(list scheduling); then what became ready starts or queues, in the order of `Traffic`. So the order in which
simultaneous events are found never shows. Ports and their queues are in `ports`.

With contention a compute stream works 1 / (1 + contention) as fast while a transfer of its rank is on the wire, sent or
received, one or several. Then the end of whatever takes time is an event too, and moves when the first transfer of the
rank starts or the last one leaves the wire; what it was before stays in the heap and says nothing when its time comes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.ir.arrays import Floats, Ints
from apportion.ir.loops.jit import inlined, lean
from apportion.planner.simulate.events import Events, Numbers, append, no_events, no_numbers, pop, push, sort
from apportion.planner.simulate.ports import (
    NONE,
    Ports,
    can_start,
    dequeue,
    enqueue,
    first_startable,
    free_ports,
    left_by,
    occupy,
    release,
)
from apportion.planner.simulate.program import LAUNCH, WAIT, Script, Traffic

NOT_YET = -1.0
#: kinds of events
_LAUNCHED, _FREED, _COMPLETE, _WORKED = range(4)
#: an event's code: its kind, and below that what it is about
_ITEM_BITS = 40
_ITEMS = (1 << _ITEM_BITS) - 1


class Times(NamedTuple):
    """What the event loop finds, float64 microseconds; NOT_YET where it never happened. A launch happens at its end.

    begin, end: [instructions]. reached, done: [launches], when its channel took it up and when it was complete.
    ready, start: [transfers]. last: int64 [launches], the transfer that was complete last, NONE without transfers.
    cause: int64 [transfers], the transfer that left the port it had waited for, NONE where it did not wait.
    """

    begin: Floats
    end: Floats
    reached: Floats
    done: Floats
    ready: Floats
    start: Floats
    last: Ints
    cause: Ints


class _State(NamedTuple):
    """clock: float64 and cursor, blocked (a launch or NONE): int64 [ranks], of the compute streams. open: int64
    [launches], transfers not yet started; launched, settled: int8 [launches]. sides: int8 [transfers], launches that
    were reached.

    With contention, of what a compute stream is at, float64 [ranks]: left, work at full speed that was left at `since`,
    which may be to come; due, when it ends as things are, NOT_YET where nothing is going on. wires: int64 [ranks],
    transfers on the wire. contention: float64 [1].
    """

    clock: Floats
    cursor: Ints
    blocked: Ints
    open: Ints
    launched: Ints
    settled: Ints
    sides: Ints
    left: Floats
    since: Floats
    due: Floats
    wires: Ints
    contention: Floats


def run(script: Script, traffic: Traffic, ports: int, contention: float = 0.0) -> tuple[Times, Floats, Ints]:
    """The times of a program, when each rank's compute stream ends [ranks], and the launch that it still waits for
    [ranks], NONE where it ran to its end. contention: by how much longer work takes beside transfers."""
    launches, transfers = len(script.rank), len(traffic.sender)
    instructions = len(script.role)
    times = Times(
        np.full(instructions, NOT_YET),
        np.full(instructions, NOT_YET),
        np.full(launches, NOT_YET),
        np.full(launches, NOT_YET),
        np.full(transfers, NOT_YET),
        np.full(transfers, NOT_YET),
        np.full(launches, NONE),
        np.full(transfers, NONE),
    )
    state = _initial(script, launches, transfers, contention)
    moved = instructions + len(state.clock) + 4 * transfers if contention > 0 else 0
    events = no_events(transfers + 2 * launches + moved)
    _run(
        script,
        traffic,
        times,
        state,
        free_ports(traffic, ports),
        events,
        no_numbers(transfers),
        no_numbers(ports),
    )
    return times, state.clock, state.blocked


def idle_until(script: Script, times: Times) -> Floats:
    """float64 [instructions]: when a wait has nothing to wait for any more; when others begin."""
    until, waits = times.begin.copy(), np.flatnonzero(script.role == WAIT)
    until[waits] = np.maximum(until[waits], times.done[script.launch[waits]])
    return until


def _initial(script: Script, launches: int, transfers: int, contention: float) -> _State:
    ranks = len(script.ptr) - 1
    return _State(
        np.zeros(ranks),
        script.ptr[:-1].copy(),
        np.full(ranks, NONE),
        np.diff(script.end_ptr),
        np.zeros(launches, np.int8),
        np.zeros(launches, np.int8),
        np.zeros(transfers, np.int8),
        np.zeros(ranks),
        np.zeros(ranks),
        np.full(ranks, NOT_YET),
        np.zeros(ranks, np.int64),
        np.array([contention], np.float64),
    )


@lean
def _run(
    script: Script,
    traffic: Traffic,
    times: Times,
    state: _State,
    ports: Ports,
    events: Events,
    fresh: Numbers,
    freed: Numbers,
) -> None:
    for rank in range(len(state.clock)):
        _advance(script, times, state, events, rank)
    while events.left[0] > 0:
        now = events.time[0]
        fresh.left[0] = freed.left[0] = 0
        while events.left[0] > 0 and events.time[0] == now:
            code = pop(events)
            kind, item = code >> _ITEM_BITS, code & _ITEMS
            if kind == _LAUNCHED:
                _launch(script, times, state, events, fresh, now, item)
            elif kind == _FREED:
                append(freed, traffic.out_port[item])
                append(freed, traffic.in_port[item])
                _count_wire(script, traffic, state, events, now, item, -1)
            elif kind == _WORKED:
                _worked(script, times, state, events, now, item)
            else:
                _settle(script, times, state, events, fresh, now, item)
        _hand_over(script, traffic, times, state, ports, events, freed, now)
        sort(fresh)
        for number in range(fresh.left[0]):
            transfer = fresh.items[number]
            times.ready[transfer] = now
            if can_start(ports, traffic, transfer):
                _start(script, traffic, times, state, ports, events, now, transfer)
            else:
                enqueue(ports, traffic, transfer)


@lean
def _advance(script: Script, times: Times, state: _State, events: Events, rank: int) -> None:
    """Runs a rank's compute stream up to its next launch, or to a wait for a time that is not known yet; with
    contention up to what takes time, whose end is an event."""
    clock, at, end = state.clock[rank], state.cursor[rank], script.ptr[rank + 1]
    slow, work = state.contention[0] > 0.0, 0.0
    while at < end:
        times.begin[at] = clock
        if script.role[at] == WAIT:
            launch = script.launch[at]
            if state.open[launch] > 0 or times.done[launch] < 0:
                state.blocked[rank] = launch
                break
            clock = max(clock, times.done[launch])
        work = script.work_us[at]
        if slow and work > 0.0:
            break
        clock += work
        times.end[at] = clock
        if script.role[at] == LAUNCH:
            push(events, clock, (_LAUNCHED << _ITEM_BITS) + at)
            break
        at += 1
    if at == end:
        work = script.end_us[rank]
        clock += 0.0 if slow else work
    state.clock[rank], state.cursor[rank] = clock, at
    if slow and work > 0.0:
        state.left[rank], state.since[rank] = work, clock
        _expect(state, events, rank)


@lean
def _expect(state: _State, events: Events, rank: int) -> None:
    """When what the rank's compute stream is at ends, as things are."""
    slow = 1.0 + state.contention[0] if state.wires[rank] > 0 else 1.0
    state.due[rank] = state.since[rank] + state.left[rank] * slow
    push(events, state.due[rank], (_WORKED << _ITEM_BITS) + rank)


@lean
def _worked(script: Script, times: Times, state: _State, events: Events, now: float, rank: int) -> None:
    """What a compute stream was at ends, unless it ends at another time by now."""
    if state.due[rank] != now:
        return
    at = state.cursor[rank]
    state.clock[rank], state.due[rank] = now, NOT_YET
    if at == script.ptr[rank + 1]:
        return
    times.end[at] = now
    if script.role[at] == LAUNCH:
        push(events, now, (_LAUNCHED << _ITEM_BITS) + at)
        return
    state.cursor[rank] = at + 1
    _advance(script, times, state, events, rank)


@lean
def _count_wire(
    script: Script, traffic: Traffic, state: _State, events: Events, now: float, transfer: int, change: int
) -> None:
    """A transfer comes to the wire (1) or leaves it (-1): with contention the ends of what its ranks are at move."""
    if state.contention[0] == 0.0:
        return
    for launch in (traffic.sender[transfer], traffic.receiver[transfer]):
        rank = script.rank[launch]
        before = state.wires[rank] > 0
        state.wires[rank] += change
        if (state.wires[rank] > 0) == before or state.due[rank] <= now:
            continue
        if now > state.since[rank]:
            done = (now - state.since[rank]) / (1.0 + state.contention[0] if before else 1.0)
            state.left[rank], state.since[rank] = max(state.left[rank] - done, 0.0), now
        _expect(state, events, rank)


@inlined
def _launch(
    script: Script,
    times: Times,
    state: _State,
    events: Events,
    fresh: Numbers,
    now: float,
    at: int,
) -> None:
    launch = script.launch[at]
    state.launched[launch] = 1
    before = script.before[launch]
    if before < 0 or state.settled[before] == 1:
        _reach(script, times, state, events, fresh, now, launch)
    rank = script.rank[launch]
    state.cursor[rank] = at + 1
    _advance(script, times, state, events, rank)


@lean
def _reach(
    script: Script,
    times: Times,
    state: _State,
    events: Events,
    fresh: Numbers,
    now: float,
    launch: int,
) -> None:
    """The channel takes up a launch; one without transfers is complete at once, and the next has its turn."""
    while True:
        times.reached[launch] = now
        for end in range(script.end_ptr[launch], script.end_ptr[launch + 1]):
            transfer = script.ends[end]
            state.sides[transfer] += 1
            if state.sides[transfer] == 2:
                append(fresh, transfer)
        if state.open[launch] > 0:
            return
        times.done[launch] = now
        state.settled[launch] = 1
        _wake(script, times, state, events, launch)
        launch = script.after[launch]
        if launch < 0 or state.launched[launch] == 0:
            return


@lean
def _settle(
    script: Script,
    times: Times,
    state: _State,
    events: Events,
    fresh: Numbers,
    now: float,
    launch: int,
) -> None:
    """A launch is complete: the channel takes up the next one, where it was launched."""
    state.settled[launch] = 1
    after = script.after[launch]
    if after >= 0 and state.launched[after] == 1:
        _reach(script, times, state, events, fresh, now, after)


@inlined
def _hand_over(
    script: Script,
    traffic: Traffic,
    times: Times,
    state: _State,
    ports: Ports,
    events: Events,
    freed: Numbers,
    now: float,
) -> None:
    """Each freed port takes the first of its queue that can start."""
    sort(freed)
    for number in range(freed.left[0]):
        release(ports, freed.items[number])
    for number in range(freed.left[0]):
        port = freed.items[number]
        if ports.user[port] >= 0 or ports.waiting[port] == 0:
            continue
        transfer = first_startable(ports, traffic, times.ready, port)
        if transfer >= 0:
            times.cause[transfer] = left_by(ports, port)
            dequeue(ports, traffic, transfer)
            _start(script, traffic, times, state, ports, events, now, transfer)


@lean
def _start(
    script: Script,
    traffic: Traffic,
    times: Times,
    state: _State,
    ports: Ports,
    events: Events,
    now: float,
    transfer: int,
) -> None:
    """Puts a transfer on the wire. Who waits for its launches goes on once their completion is known."""
    times.start[transfer] = now
    occupy(ports, traffic, transfer)
    free = now + traffic.wire_us[transfer]
    complete = free + traffic.latency_us[transfer]
    push(events, free, (_FREED << _ITEM_BITS) + transfer)
    _count_wire(script, traffic, state, events, now, transfer, 1)
    for launch in (traffic.sender[transfer], traffic.receiver[transfer]):
        if complete > times.done[launch]:
            times.done[launch], times.last[launch] = complete, transfer
        state.open[launch] -= 1
        if state.open[launch] == 0:
            push(events, times.done[launch], (_COMPLETE << _ITEM_BITS) + launch)
            _wake(script, times, state, events, launch)


@lean
def _wake(script: Script, times: Times, state: _State, events: Events, launch: int) -> None:
    """A launch's completion is known: its rank goes on, if that is what it waits for."""
    rank = script.rank[launch]
    if state.blocked[rank] == launch:
        state.blocked[rank] = NONE
        _advance(script, times, state, events, rank)
