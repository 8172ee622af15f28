"""Rule 8: the digests and the id match the bytes, and the bytes match the plan."""

from __future__ import annotations

from collections.abc import Iterator

from apportion.ir.bytes import codec, sections, table_bytes
from apportion.ir.bytes.codec import Plan
from apportion.ir.bytes.sections import Sections, sections_id
from apportion.ir.errors import ApportionError
from apportion.ir.isa import VERSION
from apportion.ir.plan import plain
from apportion.ir.verify.report import Violation
from apportion.ir.verify.subject import Subject

RULE = "digests"


def check(subject: Subject) -> Iterator[Violation]:
    """Violations of the rule `digests`; none for a plan that is not sealed yet."""
    plan = subject.plan
    if plan.sections is None:
        return
    stored: Sections = plan.sections
    actual_id = sections_id(stored)
    if stored.id != actual_id:
        message = f"the plan has id {stored.id.hex()}; its bytes have {actual_id.hex()}: they were changed"
        yield _violation(None, message)
        return
    try:
        yield from _check_bytes(plan, stored)
    except (ApportionError, OverflowError, TypeError) as error:
        yield _violation(None, f"the plan cannot be compared with its bytes: {error}")


def _violation(rank: int | None, message: str) -> Violation:
    return Violation(RULE, rank, None, None, None, message)


def _check_bytes(plan: Plan, stored: Sections) -> Iterator[Violation]:
    """Checks that the tables in memory, if they may have changed, match the bytes that the id covers."""
    encoded = codec.encode_sections(plan, [b""])  # without parts, which need not be hashed again
    for name in ("header", "request", "layouts", "moves", "report"):
        if getattr(encoded, name) != getattr(stored, name) and not (
            name == "request" and _same_request(encoded, stored)
        ):
            yield _violation(None, f"the plan's {name} differs from its bytes: seal it after a change")
    parts = stored.parts
    tables = table_bytes.tables_of(plan.layouts, plan.programs, plan.moves, plan.recurrence)
    if isinstance(parts, table_bytes.Parts) and len(parts) == plan.header.ranks and parts.encodes(tables):
        return
    if len(stored.parts) != plan.header.ranks:
        yield _violation(None, f"the plan has {plan.header.ranks} ranks; its bytes have {len(stored.parts)}")
        return
    for rank, part in enumerate(table_bytes.encode_tables(tables, plan.header.ranks)):
        if part != stored.parts[rank]:
            yield _violation(rank, "the rank's part differs from its bytes: seal the plan after a change")


def _same_request(encoded: Sections, stored: Sections) -> bool:
    """Compares requests by meaning: a request has several forms, and a plan keeps its original one."""
    new_data, old_data = (
        plain.request_data(sections.read_request(item.request, VERSION)) for item in (encoded, stored)
    )
    return bool(new_data == old_data)
