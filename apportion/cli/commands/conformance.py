"""`apportion conformance`: tests a reader of plans in another language."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from apportion.cli import options
from apportion.cli.output import FAILED, OK, count, emit, progress
from apportion.ir.errors import ConfigError

if TYPE_CHECKING:
    from apportion.cli.readers import Answer, Suite

_SHOWN = 20  # maximum number of failures printed


def conformance(
    path: Annotated[Path, Argument(help="The suite's folder; created if it does not exist.", metavar="PATH")],
    command: Annotated[
        list[str] | None,
        Argument(help="The reader's command, after --. Default: only write the suite.", metavar="COMMAND..."),
    ] = None,
    level: Annotated[
        str, Option(help="Level: read, run (the default: read and execute) or verify.", metavar="LEVEL")
    ] = "run",
    only: Annotated[str, Option(help="Only entries whose names contain this text.", metavar="TEXT")] = "",
    tolerance: Annotated[
        float | None,
        Option(help="Tolerance of outputs, for readers that do not compute in float64.", min=0.0),
    ] = None,
    timeout_s: Annotated[float, Option(help="Seconds allowed for each call of the command.", min=0.1)] = 60.0,
    as_json: options.AsJson = False,
) -> None:
    """Test a reader of plans with the conformance suite. Exit code 1 if it fails.

    The reader's command is called with `read PLAN`, `check PLAN`, `run CASE OUTPUTS` and
    `verify PLAN`; the README of the suite specifies each call.

    [bold]Examples[/bold]

      apportion conformance suite/

      apportion conformance suite/ --level read -- python examples/read_plan.py

      apportion conformance suite/ -- ./execute_plan
    """
    from apportion.cli.readers import LEVELS, Reader, Suite, questions

    if level not in LEVELS:
        raise ConfigError("--level", level, f"must be one of {', '.join(LEVELS)}", "name one of these")
    suite = Suite.open(path)
    selection = questions(suite, level, only) if command else []
    if command and not selection:
        raise ConfigError("--only", only, "no entry of the suite has such a name", "see its suite.json")
    answers: list[Answer] = []
    reader = Reader(command or (), timeout_s, tolerance)
    with progress("testing", len(selection), not as_json) as step:
        for question in selection:
            answers.append(reader.ask(question))
            step(question.name)
    record = _record(suite, command, level, answers)
    emit(record, as_json, lambda: _headline(record), *(lambda line=line: line for line in _failures(answers)))
    raise typer.Exit(OK if record["ok"] else FAILED)


def _record(suite: Suite, command: list[str] | None, level: str, answers: list[Answer]) -> dict[str, Any]:
    failures = [answer.to_data() for answer in answers if answer.why]
    summary = {"suite": str(suite.folder), "version": suite.index["version"], "counts": suite.counts}
    summary |= {"command": command, "level": level if command else None, "asked": len(answers)}
    return {**summary, "ok": not failures, "failed": failures}


def _headline(record: dict[str, Any]) -> str:
    contents = ", ".join(f"{number} {name}" for name, number in record["counts"].items())
    if not record["command"]:
        return f"{record['suite']}: the suite of format {'.'.join(map(str, record['version']))}: {contents}"
    answers = count(record["asked"], "answer")
    verdict = "all correct" if record["ok"] else f"{len(record['failed'])} wrong"
    return f"{' '.join(record['command'])}: level {record['level']}, {answers}, {verdict}"


def _failures(answers: list[Answer]) -> list[str]:
    failures = [
        f"  {answer.question.verb} {answer.question.name}: {answer.why}" for answer in answers if answer.why
    ]
    rest = len(failures) - _SHOWN
    return [*failures[:_SHOWN], *([f"  and {rest} more"] if rest > 0 else [])]
