"""Plans that relay tiles, reduce along a tree and split heads, each broken in one place: the right rule refuses it."""

from __future__ import annotations

from functools import cache

import pytest

import apportion as ap
from apportion.ir.bytes.codec import Plan
from apportion.ir.verify import Violation, check
from tests.support.parse import parse
from tests.support.strategies import STRATEGIES, cluster

MODEL = ap.Model(q_heads=4, kv_heads=2, head_dim=8, dtype="fp64", hidden=32, ffn=64, layers=1)
#: strategy -> ranks, and lengths with several runs of tokens in a tile
SIZES = {"ring": (8, [40, 24]), "node": (8, [40, 24, 17]), "ulysses": (4, [40, 24, 17])}


@cache
def good(name: str) -> str:
    """A plan as text without its id, so that an edited text is sealed again."""
    ranks, lengths = SIZES[name]
    recipe = ap.Recipe(name, STRATEGIES[name])
    plan = ap.plan(ap.Batch.from_lengths(lengths), cluster(ranks), MODEL, recipe, verify=False)
    return "\n".join(line for line in plan.text().split("\n") if not line.startswith("id "))


def broken(name: str, phase: str, old: str, new: str) -> str:
    """The plan with the first occurrence of a text in rank 2's program replaced."""
    text = good(name)
    at = text.index(old, text.index(f"program default {phase}", text.index("\nrank 2\n")))
    assert at < text.index("\nrank 3\n")
    return text[:at] + new + text[at + len(old) :]


#: strategy and fault, phase, violated rule, words of its message; then the replaced lines of rank 2's program
CASES = """
ring: own rows sent on; forward; coverage; forbidden pairs
- launch 3: send KV.work[0:8) to 3
+ launch 3: send KV.home[0:8) to 3

ring: rows sent on before they arrived; forward; dataflow; pending receive
- wait 2
- launch 3: send KV.work[0:8) to 3, receive KV.work[8:16) from 1
+ launch 3: send KV.work[0:8) to 3, receive KV.work[8:16) from 1
+ wait 2

ring: no wait; forward; transfers; wait
- wait 3

ring: gradient rows left out; backward; delivery; has not reached its home
- add dKV.work[8:14) -> dKV.work[16:22)

ring: gradient sent on without its sum; backward; delivery; merged, added or sent before
- send dKV.work[16:22) to 3
+ send dKV.work[8:14) to 3

ring: gradient added twice; backward; delivery; merged, added or sent before
- add dKV.work[0:8) -> dKV.home[0:8)
+ add dKV.work[0:8) -> dKV.home[0:8), dKV.work[0:8) -> dKV.home[0:8)

ring: sum into other rows; backward; delivery; adds tokens
- add dKV.work[0:8) -> dKV.work[8:16)
+ add dKV.work[0:8) -> dKV.home[0:8)

node: other rows relayed; forward; coverage; pairs
- send KV.work[0:5) to 3
+ send KV.work[5:10) to 3

node: relayed before it arrived; backward; dataflow; pending
- wait 0
- attend_grad Q.home[0:10) KV.work[0:5) dO.home[0:10) delta.home[0:10) -> dQ.home[0:10) dKV.work[0:5) full first_dkv, \
Q.home[5:10) KV.work[5:10) dO.home[5:10) delta.home[5:10) -> dQ.home[5:10) dKV.work[5:10) full first_dkv
- launch 2 channel 1: send KV.work[0:5) to 3, receive KV.work[20:25) from 3
+ launch 2 channel 1: send KV.work[0:5) to 3, receive KV.work[20:25) from 3
+ wait 0
+ attend_grad Q.home[0:10) KV.work[0:5) dO.home[0:10) delta.home[0:10) -> dQ.home[0:10) dKV.work[0:5) full first_dkv, \
Q.home[5:10) KV.work[5:10) dO.home[5:10) delta.home[5:10) -> dQ.home[5:10) dKV.work[5:10) full first_dkv

node: no wait; backward; transfers; wait
- wait 4

node: a branch left out of the reduction; backward; delivery; has not reached its home
- add dKV.work[30:35) -> dKV.work[0:5)

node: a branch added before it arrived; backward; dataflow; pending
- wait 4
- add dKV.work[30:35) -> dKV.work[0:5)
+ add dKV.work[30:35) -> dKV.work[0:5)
+ wait 4

node: a branch added twice; backward; delivery; merged, added or sent before
- add dKV.work[30:35) -> dKV.work[0:5)
+ add dKV.work[30:35) -> dKV.work[0:5), dKV.work[30:35) -> dKV.work[0:5)

ulysses: heads of another rank sent; forward; transfers; head set
- send Q.home[0:20).h4 to 3
+ send Q.home[0:20).h1 to 3

ulysses: heads of another rank kept; forward; dataflow; but they hold heads of set
- copy Q.home[0:20).h3 -> Q.work[40:60).h3
+ copy Q.home[0:20).h4 -> Q.work[40:60).h4

ulysses: keys of another head; forward; heads; head
- Q.work[0:40).h3 KV.work[0:40).h2
+ Q.work[0:40).h3 KV.work[0:40).h1

ulysses: own output left out; forward; results; receive results in 3 of 4 heads
- deliver O.work[40:60).h3 -> O.home[0:20).h3 first

ulysses: no wait; backward; transfers; wait
- wait 1

ulysses: own gradient left out; backward; delivery; never reaches its home
- add dKV.work[40:60).h2 -> dKV.home[0:20).h2,
+ add

ulysses: a head's gradient added twice; backward; delivery; merged, added or sent before
- dKV.work[101:121).h1 -> dKV
+ dKV.work[101:121).h1 -> dKV.home[0:20).h1, dKV.work[101:121).h1 -> dKV
"""


def first(plan: Plan) -> Violation:
    violations = check(plan)
    assert violations
    return violations[0]


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_verifies(name: str) -> None:
    recipe = ap.Recipe(name, STRATEGIES[name])
    for lengths in ([40, 24, 17], [64], [3, 50, 9, 31]):
        batch = ap.Batch.from_lengths(lengths)
        policy = ap.Policy(recipe, token_cap=batch.tokens)
        assert check(ap.plan(batch, cluster(8 if "inner" not in name else 4), MODEL, policy=policy)) == ()


@pytest.mark.parametrize("case", CASES.strip().split("\n\n"), ids=lambda case: case.partition(";")[0])
def test_a_broken_plan_is_refused_by_the_right_rule(case: str) -> None:
    head, *edit = case.split("\n")
    fault, phase, rule, words = head.split("; ")
    old, new = ("\n  ".join(line[2:] for line in edit if line[0] == sign) for sign in "-+")
    violation = first(parse(broken(fault.partition(":")[0], phase, old, new)))
    assert violation.rule == rule, str(violation)
    assert words in violation.message, str(violation)


def test_coverage_is_judged_even_if_no_task_has_known_tokens() -> None:
    """If every read of a program fails, coverage has nothing to list by head."""
    plan = good("ulysses").replace("Q.home", "O.home").replace("KV.home", "O.home")
    assert check(parse(plan))
    skipped = ("  copy", "  launch", "  wait")
    lines = [line for line in good("ulysses").split("\n") if not line.startswith(skipped)]
    assert first(parse("\n".join(lines))).rule == "dataflow"
