"""Compiled loops that a wheel brings, in `apportion/_compiled`.

numba's own cache serves one kind of CPU, so it cannot travel. These loops are compiled for a level of instructions that
nearly all machines have, and found by Python, numpy, numba, level and source: where one differs, the CPU has
less or a file cannot be read, loops are compiled where they run and numba keeps them, as without a wheel's.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import platform
import sys
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from apportion.ir.errors import ConfigError

LOG = logging.getLogger(__name__)
_PACKAGE = Path(__file__).parents[2]
SHIPPED = _PACKAGE / "_compiled"
_PARTS = ("ir", "planner")  # of the package: what its loops are made of


class Level(NamedTuple):
    """What loops of a wheel are compiled for. cpu, needs: LLVM's names of the CPU, and of what the one that runs them
    must have."""

    cpu: str
    needs: frozenset[str]


_V2 = frozenset({"cx16", "popcnt", "sahf", "sse3", "sse4.1", "sse4.2", "ssse3"})
_V3 = Level("x86-64-v3", _V2 | {"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave"})
_ARM = Level("generic", frozenset({"neon"}))
LEVELS = MappingProxyType({"x86_64": _V3, "amd64": _V3, "aarch64": _ARM, "arm64": _ARM})


def level_here() -> Level | None:
    """The level of this machine's wheels; None where there are none, or the CPU has less."""
    from llvmlite import binding

    level = LEVELS.get(platform.machine().lower())
    try:
        has = {name for name, there in binding.get_host_cpu_features().items() if there}
    except RuntimeError:  # LLVM does not know
        return None
    return level if level and level.needs <= has else None


class Shelf:
    """Loops in folders of `root`, one of each kind. A writer takes them from there alone, and adds what it compiles."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.writes = False

    @cached_property
    def level(self) -> Level | None:
        return level_here()

    @cached_property
    def folder(self) -> Path | None:
        """That of this Python, numba and level; None where there is none, or it cannot be read."""
        from numba import __version__ as numba
        from numpy import __version__ as numpy

        if self.level is None:
            return None
        python, major = sys.implementation.cache_tag, numpy.split(".")[0]
        found = self.root / f"{python}-numpy-{major}-numba-{numba}-{sys.platform}-{self.level.cpu}"
        return found if self.writes or os.access(found, os.R_OK | os.X_OK) else None

    @cached_property
    def sources(self) -> bytes:
        """Digest of all sources: a loop holds those that it calls, and constants of other modules."""
        digest = hashlib.blake2b(digest_size=32)
        for part in _PARTS:
            for path in sorted((_PACKAGE / part).rglob("*.py")):
                text = path.read_bytes()
                digest.update(f"{path.relative_to(_PACKAGE).as_posix()} {len(text)}\n".encode())
                digest.update(text)
        return digest.digest()

    def write_into(self, root: Path) -> None:
        """From now on loops are compiled for the level, into a folder of `root`. Before the first one is.

        Raises ConfigError where the CPU could not run them.
        """
        from numba import config
        from numba.core.registry import cpu_target

        if self.level is None:
            names = ", ".join(sorted({level.cpu for level in LEVELS.values()}))
            raise ConfigError(
                "--into", str(root), f"this CPU is none of {names}", "compile on another machine"
            )
        wanted = (self.level.cpu, "")
        config.CPU_NAME, config.CPU_FEATURES = wanted  # type: ignore[attr-defined]
        if cpu_target.target_context.codegen().magic_tuple()[1:] != wanted:
            raise RuntimeError("loops were compiled before it was said for what")
        self.root, self.writes = root, True
        self.__dict__.pop("folder", None)


class Shelved:
    """The cache of one function: the shelf, and where that has not what is asked for, numba's own."""

    def __init__(self, own: Any, function: Any, shelf: Shelf) -> None:
        self._own, self._shelf = own, shelf
        code = function.__code__
        self._name = f"{function.__module__}.{function.__qualname__}-{code.co_firstlineno}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The compiled function for these types of arguments, None where it must be compiled."""
        found = self._shelved(signature, target) if self._shelf.folder else None
        if found is not None or self._shelf.writes:
            return found
        try:
            return self._own.load_overload(signature, target)
        except (AttributeError, ImportError, EOFError, pickle.UnpicklingError):
            # of another release, whose types are gone, or cut short: numba would not write over it
            with suppress(OSError):
                self._own.flush()
            return None

    def _shelved(self, signature: Any, target: Any) -> Any:
        """What the shelf has, None where that is nothing, or damaged, which is said."""
        from numba.core.compiler import CompileResult

        target.refresh()
        try:
            found = self._file(self._shelf.folder).load(signature)
            return None if found is None else CompileResult._rebuild(target, *found)  # type: ignore[no-untyped-call]
        except Exception as error:  # whatever a file cut short makes of reading it
            said = f"{type(error).__name__}: {error}"
            LOG.warning(
                "%s in %s cannot be read, and is compiled here: %s", self._name, self._shelf.folder, said
            )
            return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        if not (self._shelf.folder and self._shelf.writes):
            self._own.save_overload(signature, compiled)
        elif self._own._impl.check_cachable(compiled):
            self._shelf.folder.mkdir(parents=True, exist_ok=True)
            self._file(self._shelf.folder).save(signature, self._own._impl.reduce(compiled))

    def _file(self, folder: Path | None) -> Any:
        from numba.core.caching import IndexDataCacheFile

        file: Any = IndexDataCacheFile  # numba has no types
        return file(str(folder), self._name, self._shelf.sources)
