"""Checks that tables are well formed (codes, indexes and counts), and that the header matches the request."""

from __future__ import annotations

from collections.abc import Iterator

from apportion.ir.errors import DecodeError
from apportion.ir.plan import wellformed
from apportion.ir.plan.plain import facts_of
from apportion.ir.tensors import PHASES
from apportion.ir.verify.report import Violation
from apportion.ir.verify.subject import Subject

RULE = "structure"


def check(subject: Subject) -> Iterator[Violation]:
    """Violations of the rule `structure`."""
    plan = subject.plan
    try:
        wellformed.check_header(plan.header)
        tokens = dict.fromkeys(plan.layouts, plan.request.batch.tokens)
        wellformed.check(
            plan.header,
            tokens,
            {name: layout.spans for name, layout in plan.layouts.items()},
            {key: program.tables for key, program in plan.programs.items()},
            {(move.source, move.target): move.table for move in plan.moves},
            plan.recurrence,
        )
    except DecodeError as error:
        yield Violation(RULE, None, None, None, None, str(error))
        return
    yield from _check_header(subject)


def _check_header(subject: Subject) -> Iterator[Violation]:
    """Checks the header against the request, since ranks read only the header."""
    header, request = subject.plan.header, subject.plan.request
    expected = {(kind, phase) for kind in header.kinds for phase in PHASES}
    facts = [
        ("kinds", tuple(header.kinds), tuple(request.batch.kinds)),
        *[fact[:3] for fact in facts_of(header, request)],
        ("programs", sorted(subject.plan.programs), sorted(expected)),
    ]
    for name, value, requested in facts:
        if value != requested:
            message = f"the plan has {name} = {value}, but the request has {requested}"
            yield Violation(RULE, None, None, None, None, message)
