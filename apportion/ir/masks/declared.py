"""Compares the mask that a layer declares with the plan's mask of its attention kind.

A plan lists the diagonals of each kind, (dmin, dmax): query i sees key j if dmin <= i - j <= dmax. A layer declares its
window (tokens up to and including the row itself) and whether it is causal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from apportion.ir.errors import ConfigError
from apportion.ir.masks.bands import INF

NO_WINDOW = -1

Diagonals = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Declared:
    """A layer's declared mask. window: tokens that a row sees up to itself, NO_WINDOW for all; causal: True if it sees
    no later token. None: undeclared."""

    window: int | None = None
    causal: bool | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1 and self.window != NO_WINDOW:
            rule = f"must be at least 1, or {NO_WINDOW} for no window"
            raise ConfigError(
                "window", self.window, rule, "count the row itself: left + 1 of flash-attn's window_size"
            )

    def check(self, kinds: Mapping[str, Diagonals], kind: str, layer: str | int | None = None) -> None:
        """Raises ConfigError if the plan's mask of the kind differs. A kind with too many diagonals to record
        is accepted. layer: its name, for the message."""
        for field, value in (("window", self.window), ("causal", self.causal)):
            if value is None:
                continue
            subject = f"attention kind {kind!r}" + ("" if layer is None else f" in layer {layer}")
            if not self._holds(field, kinds[kind]):
                rule = f"differs from the plan's mask of {subject}: {in_words(kinds[kind])}"
                raise ConfigError(field, value, rule, self._remedy(kinds, kind))

    def _holds(self, field: str, diagonals: Diagonals) -> bool:
        if not diagonals:
            return True
        if field == "causal":
            return all((dmin >= 0) == self.causal for dmin, _ in diagonals)
        if self.window == NO_WINDOW:
            return all(dmax >= INF for _, dmax in diagonals)
        # images inside text are bidirectional for any window
        upper = {dmax for dmin, dmax in diagonals if (dmin, dmax) != (-INF, INF)}
        return upper == {(self.window or 0) - 1}

    def _remedy(self, kinds: Mapping[str, Diagonals], kind: str) -> str:
        options = (
            option
            for option in kinds
            if kinds[option] and all(self._holds(field, kinds[option]) for field in self._declared_fields())
        )
        other = next(options, None)
        if other is not None:
            return f"call it with kind={other!r}, which is {in_words(kinds[other])}"
        mask, trees = "causal()" if self.causal is not False else "full()", ""
        if self.window is not None and self.window != NO_WINDOW:
            mask = f"sliding_window({self.window}{'' if self.causal is not False else ', right'})"
            trees = "; trees have no windows, so disable the layer's for these"
        return f"plan this kind with masks={{{kind!r}: ap.masks.{mask}}}, or pass this layer's kind{trees}"

    def _declared_fields(self) -> list[str]:
        return [field for field in ("window", "causal") if getattr(self, field) is not None]


def in_words(diagonals: Diagonals) -> str:
    """Describes diagonals in common terms, such as "causal" or "sliding window of 512"."""
    return " and ".join(_in_words(*diagonal) for diagonal in diagonals) or "too many different masks"


def _in_words(dmin: int, dmax: int) -> str:
    if (dmin, dmax) == (-INF, INF):
        return "full"
    if dmin > 0 or dmax < 0:
        return f"{dmin} <= q - k" + ("" if dmax >= INF else f" <= {dmax}")
    text = "causal" if dmax >= INF else f"sliding window of {dmax + 1}"
    return text if dmin == 0 else f"{text} plus {'all' if dmin <= -INF else -dmin} later keys"
