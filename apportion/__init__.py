"""Apportion plans context-parallel attention: which rank holds which tokens, computes which attention and moves which
bytes. `import apportion as ap` provides the names of `__init__.pyi`; each is imported on first use."""

import ast
from importlib import import_module
from pathlib import Path

from apportion.ir.version import __version__

#: public name -> (module, name in it), from the imports of the stub that type checkers read
_SOURCES = {
    (name.asname or name.name).removeprefix("_"): (statement.module, name.name)
    for statement in ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8")).body
    if isinstance(statement, ast.ImportFrom)
    for name in statement.names
}

__all__ = ["__version__", *_SOURCES]


def __getattr__(name: str) -> object:
    if name not in _SOURCES:
        raise AttributeError(f"module 'apportion' has no attribute {name!r}")
    module, attribute = _SOURCES[name]
    try:
        home = import_module(module)
        value = (
            getattr(home, attribute) if hasattr(home, attribute) else import_module(f"{module}.{attribute}")
        )
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from apportion.ir.errors import MissingDependencyError

        raise MissingDependencyError("torch", "torch", f"apportion.{name}") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
