"""Debug check for NaN and for an LSE of +inf in kernel results.

    check_kernels(True)              from here on, in all threads
    with check_kernels(True): ...    until the block ends

Off by default. It checks the result of every kernel call and so waits for the device each time. Results
are the same either way.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

from torch import Tensor

from apportion.ir.errors import ExecutionError

# process-wide, because autograd runs backward in its own threads
_SWITCH = SimpleNamespace(on=False)


def check_kernels(enabled: bool) -> ExitStack:
    """Switches the check on or off; returns a context manager that restores the previous state."""
    restore = ExitStack()
    restore.callback(setattr, _SWITCH, "on", _SWITCH.on)
    _SWITCH.on = enabled
    return restore


def is_checking() -> bool:
    """True if callers of kernels must check the results."""
    return bool(_SWITCH.on)


def require_finite(where: str, o: Tensor, lse: Tensor) -> None:
    """Checks o [rows, heads, width], lse [rows, heads] of the kernel call `where`; an LSE of -inf (no keys) is valid.

    Raises ExecutionError for NaN and for an LSE of +inf."""
    _require_none(where, "an LSE of +inf", lse.isposinf())
    _require_none(where, "NaN in LSE", lse.isnan())
    require_numbers(where, o=o)


def require_numbers(where: str, **tensors: Tensor) -> None:
    """Checks named tensors [rows, heads, width] of the kernel call `where`. Raises ExecutionError for NaN."""
    for name, tensor in tensors.items():
        _require_none(where, f"NaN in {name}", tensor.isnan().any(-1))


def _require_none(where: str, problem: str, bad: Tensor) -> None:
    """Raises ExecutionError if any of bad, bool [rows, heads], is set."""
    if bad.any():
        row, head = bad.nonzero()[0].tolist()
        raise ExecutionError(
            f"{where}: {problem}, first in row {row}, head {head}, in {int(bad.sum())} of {bad.numel()}. Look for NaN "
            "and inf in the layer's inputs; if there are none, the kernel is wrong: report it with the plan"
        )
