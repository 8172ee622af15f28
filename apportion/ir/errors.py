"""The exception tree.

    ApportionError
    ├── ConfigError (ValueError)        a batch, cluster, model, policy or recipe field is wrong
    │   └── UnknownNameError (KeyError) unknown name of a recipe, pass, solver, mask or kind
    ├── CapacityError (ValueError)      the request is well formed but cannot be served; gives the numbers
    ├── DecodeError (ValueError)        bytes or text that are not a valid plan
    │   └── VersionError                a plan of an unknown major version
    ├── VerifyError (ValueError)        a plan violates a rule; carries every violation
    ├── MissingDependencyError (ImportError)  an optional part is not installed; names the extra
    └── ExecutionError (RuntimeError)   a backend cannot run the plan (ranks hold different plans, wrong shapes, …)

Every error also derives from the closest builtin exception, so callers may catch either.
"""

from __future__ import annotations

from reprlib import Repr
from typing import Any

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 120


def gib(size: float) -> str:
    """Formats bytes in GiB: two decimals, or three significant digits for small sizes."""
    amount = size / 2**30
    return f"{amount:.2f} GiB" if amount >= 1 else f"{amount:.3g} GiB"


class ApportionError(Exception):
    """Base of all errors that Apportion raises on purpose."""


class ConfigError(ApportionError, ValueError):
    """A field of the request is wrong: names the field, the value, the rule and the remedy."""

    def __init__(self, field: str, value: Any, rule: str, remedy: str) -> None:
        self.field, self.value, self.rule, self.remedy = field, value, rule, remedy
        super().__init__(f"{field} = {_SHORT.repr(value)}: {rule}; {remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.value, self.rule, self.remedy)


class UnknownNameError(ConfigError, KeyError):
    """Unknown name of a recipe, pass, solver, mask or attention kind."""

    __str__ = Exception.__str__


class CapacityError(ApportionError, ValueError):
    """The request is well formed but cannot be served; the message gives the numbers."""


class DecodeError(ApportionError, ValueError):
    """Bytes or text that are not a valid plan."""


class VersionError(DecodeError):
    """A plan of a major version that this release does not read."""


class VerifyError(ApportionError, ValueError):
    """A plan violates a rule. `violations` lists all of them, the root cause first."""

    def __init__(self, message: str, violations: tuple[Any, ...] = ()) -> None:
        self.violations = violations
        super().__init__(message)


class MissingDependencyError(ApportionError, ImportError):
    """An optional part is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        self.package, self.extra, self.purpose = package, extra, purpose
        super().__init__(f"{purpose} needs {package}: pip install '.[{extra}]' in Apportion's folder")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.package, self.extra, self.purpose)


class ExecutionError(ApportionError, RuntimeError):
    """A backend cannot run the plan."""
