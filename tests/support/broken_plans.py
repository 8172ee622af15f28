"""A good plan, and edits that each break it in one place, with the broken rule and its place."""

# ruff: noqa: E501  plans have one instruction per line

from __future__ import annotations

from apportion.ir.bytes.codec import Plan
from tests.support.parse import parse

# Three ranks of eight tokens each, one causal document. Rank 0 computes only on its own keys, rank 1 receives the keys
# of rank 0, rank 2 sends queries to rank 1 and receives a partial; two head sets are sent separately.
GOOD = """
apportion.plan 3.0
request {
  "batch": {"lengths": [24], "mask": {"causal": {}}},
  "cluster": {"nodes": 1, "ranks_per_node": 3},
  "model": {"q_heads": 4, "kv_heads": 2, "head_dim": 4, "dtype": "fp64"},
  "policy": {"recipe": {"name": "by_hand", "steps": {}}}
}
header {"head_sets": [[0, 1], [0]]}

rank 0
layout attention: row=0 token=0 length=8 sequence=0 position=0
program default forward
  launch 0: send KV.home[0:8) to 1, send KV.home[0:8) to 2
  attend Q.home[0:8) KV.home[0:8) -> O.home[0:8) causal first
  wait 0
  finish O.home[0:8)
program default backward
  delta dO.home[0:8) O.home[0:8) -> delta.home[0:8)
  launch 0: send KV.home[0:8) to 1, send KV.home[0:8) to 2
  attend_grad Q.home[0:8) KV.home[0:8) dO.home[0:8) delta.home[0:8) -> dQ.home[0:8) dKV.home[0:8) causal first_dq first_dkv
  wait 0
  launch 1: receive dKV.work[0:8) from 1, receive dKV.work[8:16) from 2
  wait 1
  add dKV.work[0:8) -> dKV.home[0:8), dKV.work[8:16) -> dKV.home[0:8)

rank 1
layout attention: row=0 token=8 length=8 sequence=0 position=8
program default forward
  launch 0: receive KV.work[0:8) from 0, receive Q.work[0:8).h1 from 2, receive Q.work[8:16).h3 from 2
  attend Q.home[0:8) KV.home[0:8) -> O.home[0:8) causal first
  wait 0
  attend Q.home[0:8) KV.work[0:8) -> O.home[0:8) full
  attend Q.work[0:8).h1 KV.home[0:8).h2 -> O.work[0:8).h1 full first
  launch 1: send O.work[0:8).h1 to 2
  wait 1
  finish O.home[0:8)
program default backward
  delta dO.home[0:8) O.home[0:8) -> delta.home[0:8)
  launch 0: receive KV.work[0:8) from 0, send KV.home[0:8) to 2
  attend_grad Q.home[0:8) KV.home[0:8) dO.home[0:8) delta.home[0:8) -> dQ.home[0:8) dKV.home[0:8) causal first_dq first_dkv
  wait 0
  attend_grad Q.home[0:8) KV.work[0:8) dO.home[0:8) delta.home[0:8) -> dQ.home[0:8) dKV.work[0:8) full first_dkv
  launch 1: send dKV.work[0:8) to 0, receive dKV.work[8:16) from 2
  wait 1
  add dKV.work[8:16) -> dKV.home[0:8)

rank 2
layout attention: row=0 token=16 length=8 sequence=0 position=16
program default forward
  launch 0: receive KV.work[0:8) from 0, send Q.home[0:8).h1 to 1, send Q.home[0:8).h3 to 1
  attend Q.home[0:8) KV.home[0:8) -> O.home[0:8) causal first
  wait 0
  attend Q.home[0:8) KV.work[0:8) -> O.home[0:8) full
  launch 1: receive O.work[0:8).h1 from 1
  wait 1
  merge O.work[0:8).h1 -> O.home[0:8).h1
  finish O.home[0:8)
program default backward
  delta dO.home[0:8) O.home[0:8) -> delta.home[0:8)
  launch 0: receive KV.work[0:8) from 0, receive KV.work[8:16) from 1
  attend_grad Q.home[0:8) KV.home[0:8) dO.home[0:8) delta.home[0:8) -> dQ.home[0:8) dKV.home[0:8) causal first_dq first_dkv
  wait 0
  attend_grad Q.home[0:8) KV.work[0:16) dO.home[0:8) delta.home[0:8) -> dQ.home[0:8) dKV.work[0:16) full first_dkv
  launch 1: send dKV.work[0:8) to 0, send dKV.work[8:16) to 1
  wait 1
"""
# the other two heads of rank 2's queries on rank 1's keys are handled like the first two
GOOD = GOOD.replace(
    "  attend Q.work[0:8).h1 KV.home[0:8).h2 -> O.work[0:8).h1 full first\n  launch 1: send O.work[0:8).h1 to 2\n",
    "  attend Q.work[0:8).h1 KV.home[0:8).h2 -> O.work[0:8).h1 full first\n"
    "  attend Q.work[8:16).h3 KV.home[0:8).h4 -> O.work[8:16).h3 full first\n"
    "  launch 1: send O.work[0:8).h1 to 2, send O.work[8:16).h3 to 2\n",
)
GOOD = GOOD.replace(
    "  launch 1: receive O.work[0:8).h1 from 1\n  wait 1\n  merge O.work[0:8).h1 -> O.home[0:8).h1\n",
    "  launch 1: receive O.work[0:8).h1 from 1, receive O.work[8:16).h3 from 1\n  wait 1\n"
    "  merge O.work[0:8).h1 -> O.home[0:8).h1, O.work[8:16).h3 -> O.home[0:8).h3\n",
).replace("[[0, 1], [0]]", "[[0, 1], [0], [2, 3], [1]]")


def broken(*edits: tuple[str, str], rank: int, phase: str = "forward") -> Plan:
    """The good plan with edits (old, new) in the text of one rank's program, sealed again."""
    before, section = GOOD.split(f"\nrank {rank}\n")
    section, *after = section.split(f"\nrank {rank + 1}\n")
    forward, backward = section.split("program default backward")
    part = forward if phase == "forward" else backward
    for old, new in edits:
        assert part.count(old) == 1, old
        part = part.replace(old, new)
    section = "program default backward".join((part, backward) if phase == "forward" else (forward, part))
    return parse(f"\nrank {rank + 1}\n".join([f"{before}\nrank {rank}\n{section}", *after]))


# name -> rule, rank, phase and instruction of the violation, the edit, part of the message
CASES = {
    # 4: transfers
    "receive another number of rows": (
        "transfers", 2, "forward", 0, ("receive KV.work[0:8) from 0", "receive KV.work[0:7) from 0"),
        "receives KV rows [0, 7) in round 0, but rank 0 sends KV rows [0, 8)",
    ),
    "receive another tensor": (
        "transfers", 1, "forward", 0, ("receive KV.work[0:8) from 0, receive Q.work[0:8).h1 from 2",
                                       "receive KV.work[0:8) from 0, receive KV.work[0:8).h1 from 2"),
        "receives KV rows [0, 8) of head set 1 in round 0, but rank 2 sends Q rows [0, 8) of head set 1",
    ),
    "receive other heads": (
        "transfers", 2, "forward", 4, ("receive O.work[0:8).h1 from", "receive O.work[0:8).h3 from"),
        "of head set 3 in round 1, but rank 1 sends O rows [0, 8) of head set 1",
    ),
    "send to itself": (
        "transfers", 2, "forward", 0, ("send Q.home[0:8).h1 to 1", "send Q.home[0:8).h1 to 2"), "itself",
    ),
    "swap the transfers of a pair": (
        "transfers", 2, "forward", 4,
        ("receive O.work[0:8).h1 from 1, receive O.work[8:16).h3 from 1",
         "receive O.work[8:16).h3 from 1, receive O.work[0:8).h1 from 1"),
        "head set",
    ),
    "launch in falling order": (
        "transfers", 0, "backward", 4, ("launch 1:", "launch 0:"), "rounds must ascend",
    ),
    "forget a wait": ("transfers", 1, "forward", 6, ("  wait 1\n", ""), "never waits"),
    "wait twice": ("transfers", 1, "forward", 8, ("  wait 1\n", "  wait 1\n  wait 1\n"), "a second time"),
    "wait before the launch": (
        "transfers", 2, "forward", 4, ("  launch 1:", "  wait 1\n  launch 1:"), "not launched before",
    ),
    "another channel": ("transfers", 2, "forward", 0, ("launch 0:", "launch 0 channel 3:"), "channel 3, but rank 0"),
    "another mode": ("transfers", 2, "forward", 4, ("launch 1:", "launch 1 all_to_all:"), "mode"),
    # 7: heads
    "another KV head": ("heads", 1, "forward", 4, (".h1 KV.home[0:8).h2", ".h1 KV.home[0:8).h4"), "needs KV head 0"),
    # 3: dataflow
    "read before the wait": (
        "dataflow", 2, "forward", 2,
        ("  wait 0\n  attend Q.home[0:8) KV.work[0:8) -> O.home[0:8) full\n",
         "  attend Q.home[0:8) KV.work[0:8) -> O.home[0:8) full\n  wait 0\n"),
        "reads KV work rows [0, 8), which a pending receive is still filling",
    ),
    "read what nobody wrote": (
        "dataflow", 2, "forward", 3, ("attend Q.home[0:8) KV.work[0:8)", "attend Q.home[0:8) KV.work[1:9)"),
        "KV work rows [8, 9), which nothing has written",
    ),
    "accumulate onto nothing": (
        "dataflow", 1, "forward", 1, ("causal first", "causal"), "adds to O home rows [0, 8), which nothing has written",
    ),
    "overwrite what is being sent": (
        "dataflow", 1, "forward", 7,
        ("  wait 1\n", "  attend Q.home[0:8) KV.home[0:8) -> O.work[0:8) causal first\n  wait 1\n"),
        "overwrites O work rows [0, 8), which a pending send is still reading",
    ),
    "write what is being received": (
        "dataflow", 2, "forward", 1, ("  attend Q.home[0:8) KV.home[0:8)",
                                      "  copy KV.home[0:8) -> KV.work[0:8)\n  attend Q.home[0:8) KV.home[0:8)"),
        "writes KV work rows [0, 8), which a pending receive is still filling",
    ),
    "pair queries with other gradients": (
        "dataflow", 2, "backward", 2,
        ("Q.home[0:8) KV.home[0:8) dO.home[0:8) delta.home[0:8) -> dQ.home[0:8) dKV.home[0:8) causal",
         "Q.home[0:4) KV.home[0:8) dO.home[4:8) delta.home[0:4) -> dQ.home[0:4) dKV.home[0:8) causal"),
        "pairs dO home rows [4, 8) of tokens [20, 24) with tokens [16, 20)",
    ),
    "read other heads than were written": (
        "dataflow", 1, "forward", 4,
        ("Q.work[0:8).h1 KV.home[0:8).h2 -> O.work[0:8).h1", "Q.work[0:8).h3 KV.home[0:8).h4 -> O.work[0:8).h3"),
        "as heads of set 3",
    ),
    # 5: delivery
    "merge twice": (
        "delivery", 2, "forward", 6,
        ("O.work[0:8).h1 -> O.home[0:8).h1,", "O.work[0:8).h1 -> O.home[0:8).h1, O.work[0:8).h1 -> O.home[0:8).h1,"),
        "whose partial was merged, added or sent before",
    ),
    "forget to merge": (
        "delivery", 2, "forward", None, ("O.work[0:8).h1 -> O.home[0:8).h1, ", ""),
        "ends with a partial of tokens [16, 24) in O work rows [0, 8)",
    ),
    "overwrite a partial": (
        "delivery", 2, "forward", 3, ("O.home[0:8) full\n", "O.home[0:8) full first\n"),
        "overwrites O home rows [0, 8), which hold a partial of tokens [16, 24)",
    ),
    "finish twice": ("delivery", 0, "forward", 4, ("  finish O.home[0:8)\n", "  finish O.home[0:8)\n" * 2), "finished"),
    "forget to finish": ("delivery", 0, "forward", None, ("  finish O.home[0:8)\n", ""), "unfinished"),
    "compute delta twice": (
        "delivery", 2, "backward", 1, ("  delta dO.home[0:8) O.home[0:8) -> delta.home[0:8)\n",
                                       "  delta dO.home[0:8) O.home[0:8) -> delta.home[0:8)\n" * 2), "second time",
    ),
    # 2: coverage
    "attend to later keys": (
        "coverage", 0, "forward", 1, ("KV.home[0:8) -> O.home[0:8) causal", "KV.home[0:8) -> O.home[0:8) full"),
        "computes 28 forbidden pairs",
    ),
    "attend twice": (
        "coverage", 2, "forward", 4,
        ("KV.work[0:8) -> O.home[0:8) full\n", "KV.work[0:8) -> O.home[0:8) full\n  attend Q.home[0:8) KV.work[0:8) -> O.home[0:8) full\n"),
        "that rank 2, instruction 3 also computes",
    ),
    "leave a task out": (
        "coverage", 2, "forward", None, ("  attend Q.home[0:8) KV.work[0:8) -> O.home[0:8) full\n", ""),
        "leave out 64 of 300 allowed pairs, in 1 bands of the mask; the first is query 16 (home row 0 of rank 2), key 0",
    ),
    "leave the first task out": (
        "coverage", 0, "forward", None, ("  attend Q.home[0:8) KV.home[0:8) -> O.home[0:8) causal first\n", ""),
        "leave out 36 of 300",
    ),
    "leave a diagonal out": (
        "coverage", 1, "backward", None, ("dKV.home[0:8) causal", "dKV.home[0:8) [1,7]"), "query 8 (home row 0 of rank 1), key 8",
    ),
    # structure
    "an accumulator as keys": (
        "operands", 0, "forward", 1, ("attend Q.home[0:8) KV.home[0:8)", "attend Q.home[0:8) Q.home[0:8)"), "must be KV",
    ),
    "rows that differ": (
        "operands", 0, "forward", 1, ("-> O.home[0:8) causal", "-> O.home[0:7) causal"), "a different number of rows",
    ),
    "heads that differ": (
        "operands", 1, "forward", 4, ("-> O.work[0:8).h1 full", "-> O.work[0:8).h3 full"), "different heads",
    ),
    "a band beyond the rows": ("operands", 0, "forward", 1, ("causal", "[0,8]"), "goes beyond the rows"),
    "home rows that are not there": (
        "operands", 0, "forward", None, ("finish O.home[0:8)", "finish O.home[0:9)"), "ends after the last of 8 rows",
    ),
    "finish in work rows": ("operands", 0, "forward", 3, ("finish O.home", "finish O.work"), "must be at home"),
}  # fmt: skip
