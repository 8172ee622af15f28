"""Optional compilation of hot loops.

A function under `jit` is plain Python on integers and numpy columns. With numba it comes compiled with the package
(`ir.loops.shelf`), or is compiled on first use and cached on disk; without, it runs as written. Results are equal by
construction: one source, integer arithmetic.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from apportion.ir.loops.shelf import SHIPPED, Shelf, Shelved

F = TypeVar("F", bound=Callable[..., Any])

LOG = logging.getLogger(__name__)
_LONG_S = 2.0  # of compiling, before it is said: a recipe's last loop or two are no news


def _numba() -> Any:
    try:
        import numba
    except ImportError:
        return None
    return numba


_NUMBA = _numba()
HAS_NUMBA = _NUMBA is not None
#: whether loops are compiled here: numba is installed, and NUMBA_DISABLE_JIT does not switch it off
COMPILES = HAS_NUMBA and not _NUMBA.config.DISABLE_JIT
#: the compiled loops that came with the package
shelf = Shelf(SHIPPED)


def jit(function: F) -> F:
    """Compile `function` with numba where it is installed, else return it unchanged."""
    return _compiled(function)


def lean(function: F) -> F:
    """As `jit`, for a function that allocates no arrays, for use by others of its kind: it counts no references to
    its arguments, which would cost more than the work of a small function."""
    return _compiled(function, _nrt=False)


def unlocked(function: F) -> F:
    """As `jit`, for a long loop: other threads of Python run beside it. A short one would wait for them longer than it
    runs."""
    return _compiled(function, nogil=True)


def inlined(function: F) -> F:
    """As `lean`, for a function with a caller or two, which takes many columns: passing them costs more than its
    work."""
    return _compiled(function, _nrt=False, forceinline=True)


def _compiled(function: F, **options: bool) -> F:
    if not HAS_NUMBA:
        return function
    try:
        dispatcher = _NUMBA.njit(cache=True, **options)(function)
    except (
        RuntimeError
    ):  # no folder can be written: what did not come with the package is compiled in every process
        dispatcher = _NUMBA.njit(**options)(function)
    if COMPILES:
        if _is_ours(function):
            dispatcher._cache = Shelved(dispatcher._cache, function, shelf)
        template = dispatcher.get_call_template
        dispatcher.get_call_template = lambda args, kws: template(
            [_general(arg) for arg in args], {name: _general(kw) for name, kw in kws.items()}
        )
    return cast(F, dispatcher)


def _general(kind: Any) -> Any:
    """The type that an argument of this one is passed as from loop to loop: a number written in the source is like any
    other, and a narrow one is an int64. Else numba compiles a function anew for each."""
    types = _NUMBA.types
    kind = types.unliteral(kind)
    return types.int64 if isinstance(kind, types.Integer) and kind.bitwidth < 64 else kind


# ---------------------------------------------------------------------------------------------- cold caches


@dataclass
class Compiling:
    """What this process has compiled because the cache on disk had it not. loops: functions, each for the types of its
    arguments; told: whether it was said."""

    loops: int = 0
    told: bool = False
    _done_s: float = 0.0
    _begun_s: float = 0.0
    _depth: int = 0

    @property
    def seconds(self) -> float:
        """Those of a loop that is being compiled included."""
        return self._done_s + (time.monotonic() - self._begun_s if self._depth else 0.0)

    def begin(self) -> None:
        """A loop: perhaps one that another one calls, which is being compiled."""
        if not self._depth:
            self._begun_s = time.monotonic()
        self._depth += 1
        self.loops += 1
        if not self.told and self.seconds > _LONG_S:
            self.told = True
            LOG.warning(
                "compiling the planner's loops, once for each installation: it can take minutes; "
                "`apportion warmup` does it beforehand"
            )

    def end(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._done_s += time.monotonic() - self._begun_s


compiling = Compiling()


def _watch() -> None:
    """Has numba tell `compiling`. Its event comes with what is compiled, and not with what the cache has."""
    from numba.core.event import Listener, register

    class Compiles(Listener):
        def on_start(self, event: Any) -> None:
            if _is_ours(event.data["dispatcher"].py_func):
                compiling.begin()

        def on_end(self, event: Any) -> None:
            if _is_ours(event.data["dispatcher"].py_func):
                compiling.end()

    register("numba:compile", Compiles())  # type: ignore[no-untyped-call]


def _is_ours(function: Any) -> bool:
    return str(function.__module__).startswith("apportion.")


if COMPILES:
    _watch()
