"""The verifier: checks ten rules on a finished plan, without other input.

    structure ─ digests ─ layouts ─ operands ─ transfers ─ heads ─ limits ─ dataflow · delivery · results ─ coverage
    (no rule,   8         1         (no rule)  4           7       6        3          5          5         2
    all need it)                                        then samples (2 again), recurrences (10) and last report (9)

It shares only the codec and the band algebra with the planner. One walk over every rank (`walk/judge.py`) proves
coverage and all program rules at once. If it refuses a plan, `explain/` reports the fault, its place and the violated
rule, the root cause before its consequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from apportion.ir import text
from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import ApportionError, CapacityError, VerifyError
from apportion.ir.fields import instance
from apportion.ir.threads import checked_threads
from apportion.ir.verify.explain import words
from apportion.ir.verify.report import Violation, first_few
from apportion.ir.verify.rules import (
    coverage,
    digests,
    layouts,
    limits,
    recurrences,
    reported,
    samples,
    structure,
)
from apportion.ir.verify.subject import Subject

__all__ = ["RULES", "VerifierRule", "Violation", "check", "verify"]

_SHOWN = 10


@dataclass(frozen=True)
class VerifierRule:
    """A rule. needs: rules that must hold first. stage: violations are sorted by stage, and by time within a stage."""

    name: str
    number: int | None
    find: Callable[[Subject], Iterator[Violation]]
    stage: int
    needs: tuple[str, ...] = ("structure",)


def _walk_check(rule: str) -> Callable[[Subject], Iterator[Violation]]:
    """Returns a check that yields the walk's violations of a rule."""
    return lambda subject: (violation for violation in words.violations(subject) if violation.rule == rule)


_WALKABLE = ("structure", "layouts")
_RUNNABLE = (*_WALKABLE, "operands")
_TRACEABLE = (*_RUNNABLE, "transfers")
_PROGRAM_RULES = (
    VerifierRule("structure", None, structure.check, 0, ()),
    VerifierRule("digests", 8, digests.check, 1),
    VerifierRule("layouts", 1, layouts.check, 2),
    VerifierRule("operands", None, _walk_check("operands"), 3, _WALKABLE),
    VerifierRule("transfers", 4, _walk_check("transfers"), 4, _RUNNABLE),
    VerifierRule("heads", 7, _walk_check("heads"), 5, _TRACEABLE),
    VerifierRule("limits", 6, limits.check, 6, _RUNNABLE),
    VerifierRule("dataflow", 3, _walk_check("dataflow"), 7, _TRACEABLE),
    VerifierRule("delivery", 5, _walk_check("delivery"), 7, _TRACEABLE),
    VerifierRule("results", 5, _walk_check("results"), 7, _TRACEABLE),
    VerifierRule("coverage", 2, coverage.check, 8, _TRACEABLE),
    VerifierRule(
        "samples", 2, samples.check, 9, (*_TRACEABLE, "heads", "dataflow", "delivery", "results", "coverage")
    ),
    VerifierRule("recurrences", 10, recurrences.check, 10, _WALKABLE),
)
# skipped for plans that violate another rule
_REPORT = VerifierRule("report", 9, reported.check, 11, tuple(rule.name for rule in _PROGRAM_RULES))
RULES = (*_PROGRAM_RULES, _REPORT)
_STAGES = {rule.name: rule.stage for rule in RULES}


def verify(plan: Plan, threads: int = 1) -> None:
    """Raises VerifyError with all violations if the plan breaks a rule. threads: number of threads.

    Raises ConfigError for objects other than plans, and for an invalid number of threads.
    """
    violations = check(instance("plan", plan, Plan, "make one with plan(...)"), threads)
    if violations:
        rest = len(violations) - _SHOWN
        lines = [f"the plan has {_count(violations)}", *map(str, violations[:_SHOWN])]
        if rest > 0:
            lines.append(f"and {rest} more")
        raise VerifyError("\n  ".join(lines), violations)


def check(plan: Plan, threads: int = 1) -> tuple[Violation, ...]:
    """The violations of all rules, the root cause first; at most a few of each rule.

    Never raises for a broken plan.
    """
    subject = Subject(plan, checked_threads(threads))
    by_rule: dict[str, tuple[Violation, ...]] = {}
    for rule in RULES:
        if not any(by_rule.get(name, True) for name in rule.needs):
            by_rule[rule.name] = _apply(rule, subject)
    items = [violation for violations in by_rule.values() for violation in violations]
    if not items and not subject.holds:
        items = [
            Violation("coverage", None, None, None, None, "the walk cannot trace the attention of its tasks")
        ]
    items.sort(key=lambda item: _sort_key(item, by_rule))
    return tuple(_with_excerpt(plan, item) for item in items)


def _apply(rule: VerifierRule, subject: Subject) -> tuple[Violation, ...]:
    try:
        return first_few(rule.find(subject))
    except CapacityError as error:
        return (Violation(rule.name, None, None, None, None, f"cannot be verified: {error}"),)


def _sort_key(violation: Violation, by_rule: dict[str, tuple[Violation, ...]]) -> tuple[int, int]:
    """(stage, time); a violation that another rule's violations explain comes after them."""
    explained = bool(violation.cause and by_rule.get(violation.cause))
    stage = _STAGES[violation.cause] if explained else _STAGES[violation.rule]
    return 2 * stage + explained, violation.order


def _with_excerpt(plan: Plan, violation: Violation) -> Violation:
    if violation.instruction is None or violation.rank is None:
        return violation
    kind, phase = violation.kind or "", violation.phase or ""
    try:
        lines = text.excerpt(plan.program(violation.rank, kind, phase), violation.instruction)
    except (ApportionError, ValueError, IndexError):  # too broken to print
        return violation
    return replace(violation, excerpt=lines)


def _count(violations: tuple[Violation, ...]) -> str:
    rules = dict.fromkeys(violation.rule for violation in violations)
    return f"{len(violations)} violation{'s' if len(violations) > 1 else ''} ({', '.join(rules)})"
