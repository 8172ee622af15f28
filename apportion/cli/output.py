"""Output and exit codes of commands."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from rich.console import RenderableType

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
quiet = False  # only errors are printed to stderr
WIDTH = 80  # minimum for tables; in narrower terminals lines wrap rather than lose figures


def refuse(message: str, error: Exception, as_json: bool, code: int = BAD_INPUT) -> int:
    """Report the error, in one paragraph on stderr or as JSON on stdout; returns the exit code."""
    if as_json:
        names = (name for name in ("field", "value", "rule", "remedy") if hasattr(error, name))
        facts = {name: str(getattr(error, name)) for name in names}
        json_line = json.dumps({"error": {"type": type(error).__name__, "message": message} | facts}) + "\n"
    else:
        json_line = ""
        print(f"apportion: {message}", file=sys.stderr)
    try:
        print(json_line, end="", flush=True)
    except OSError:  # nobody reads it; the exit code still reports the failure
        drop_stdout()
    return code


def drop_stdout() -> None:
    """Discard buffered stdout: flushing it when Python exits would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def emit(
    record: Mapping[str, Any], as_json: bool, *views: Callable[[], RenderableType], width: int = WIDTH
) -> None:
    """Print the result: `record` as one line of JSON, or its views, at least `width` columns wide. If the reader of a
    pipe closes it early, as in `apportion show P.plan | head`, the exit code does not change."""
    try:
        if as_json:
            print(json.dumps(record, allow_nan=False))
        else:
            _print_views(views, width)
        print(end="", flush=True)
    except BrokenPipeError:
        drop_stdout()


class _Printer(Console):
    def on_broken_pipe(self) -> None:
        """Raises, because rich would end the process with exit code 1."""
        raise BrokenPipeError


def _print_views(views: Sequence[Callable[[], RenderableType]], width: int) -> None:
    console = _Printer(highlight=False)
    console.width = max(console.width, width)
    for view in views:
        renderable = view()
        if isinstance(renderable, str):
            print(renderable)  # rich would take brackets for markup and wrap lines
        else:
            console.print(renderable)


def note(message: str) -> None:
    if not quiet:
        print(message, file=sys.stderr)


def status(message: str) -> AbstractContextManager[object]:
    """A spinner on stderr while work is in progress, if stderr is a terminal."""
    return nullcontext() if quiet else Console(stderr=True).status(message)


def count(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


@contextmanager
def progress(title: str, total: int | None = None, shown: bool = True) -> Iterator[Callable[..., None]]:
    """Show a bar if stderr is a terminal; call the yielded function with the name of each finished item. Its
    arguments: total, if it was not known before; at: number of finished items, by default one more; detail: text
    after the bar until the next call."""
    texts = TextColumn("{task.description}"), TextColumn("{task.fields[detail]}")
    columns = texts[0], BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), texts[1]
    console = Console(stderr=True)
    hidden = quiet or not (shown and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(title, total=total, detail="")

        def report(
            done: str = "", total: int | None = total, at: int | None = None, detail: str = ""
        ) -> None:
            text, step = f"{title} {done}".rstrip(), 1 if at is None else None
            bar.update(task, total=total, description=text, completed=at, advance=step, detail=detail)

        yield report
