"""Masks that layers declare, compared with the masks of plans."""

from __future__ import annotations

import re

import pytest

from apportion import Batch, ConfigError, Sequence, masks
from apportion.ir.masks.declared import NO_WINDOW, Declared, in_words
from apportion.ir.masks.spec import Mask

SPANS = [(1, 3)]
DIFFERS = "differs from the plan's mask of attention kind 'default' in layer 3"
MASKS: dict[str, Mask] = {
    "causal": masks.causal(),
    "full": masks.full(),
    "window": masks.sliding_window(512),
    "both": masks.sliding_window(512, 511),
    "sink": masks.sink_window(4, 512),
    "prefix": masks.prefix_lm(3),
    "video": masks.block_causal(4, 2),
    "images": masks.image_spans(SPANS),
    "local images": masks.image_spans(SPANS, masks.sliding_window(512)),
    "tree": masks.tree([(-1, 4), (0, 1), (0, 1)]),
}


def diagonals(name: str) -> dict[str, tuple[tuple[int, int], ...]]:
    return {"default": Batch.from_lengths([6], MASKS[name]).diagonals("default")}


@pytest.mark.parametrize(
    ("declared", "fits"),
    [
        (Declared(), set(MASKS)),
        (Declared(window=512), {"window", "both", "local images"}),
        (Declared(window=511), set()),
        (Declared(window=NO_WINDOW), {"causal", "full", "prefix", "video", "images", "tree"}),
        (Declared(causal=True), {"causal", "window", "sink", "tree"}),
        (Declared(causal=False), {"full", "both", "video"}),
        (Declared(512, True), {"window"}),
        (Declared(512, False), {"both"}),
        (Declared(NO_WINDOW, True), {"causal", "tree"}),
    ],
)
def test_a_declaration_fits_exactly_the_matching_masks(declared: Declared, fits: set[str]) -> None:
    for name in MASKS:
        if name in fits:
            declared.check(diagonals(name), "default")
        else:
            with pytest.raises(ConfigError):
                declared.check(diagonals(name), "default")


@pytest.mark.parametrize(
    ("declared", "name", "message"),
    [
        (
            Declared(512),
            "causal",
            f"window = 512: {DIFFERS}: causal; plan this kind with masks={{'default': ap.masks.sliding_window(512)}}, "
            "or pass this layer's kind; trees have no windows, so disable the layer's for these",
        ),
        (Declared(NO_WINDOW), "window", "of 512; plan this kind with masks={'default': ap.masks.causal()}"),
        (Declared(causal=True), "full", f"causal = True: {DIFFERS}: full"),
        (Declared(causal=False), "causal", "ap.masks.full()}"),
        (Declared(512, False), "full", "ap.masks.sliding_window(512, right)}"),
        (Declared(64), "sink", "sliding window of 512 and causal; "),
        (Declared(64), "both", "sliding window of 512 plus 511 later keys; "),
    ],
)
def test_errors_name_layer_kind_mask_and_remedy(declared: Declared, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        declared.check(diagonals(name), "default", layer=3)


def test_the_error_names_the_kind_that_fits() -> None:
    kinds = {"global": masks.causal(), "local": masks.sliding_window(4)}
    batch = Batch.from_lengths([2], kinds)
    by_kind = {kind: batch.diagonals(kind) for kind in kinds}
    with pytest.raises(ConfigError, match=r"call it with kind='local', which is sliding window of 4$"):
        Declared(4, True).check(by_kind, "global")
    Declared(4, True).check(by_kind, "local")


def test_declarations_are_not_checked_against_too_many_masks() -> None:
    many = Batch.from_sequences([Sequence(4, masks.sliding_window(n)) for n in range(1, 10)])
    Declared(99, False).check({"default": many.diagonals("default")}, "default")
    assert in_words(()) == "too many different masks"
    assert in_words(((2, 3), (-1, 2**62))) == "2 <= q - k <= 3 and causal plus 1 later keys"


@pytest.mark.parametrize("window", [0, -2])
def test_a_window_has_at_least_one_token(window: int) -> None:
    with pytest.raises(ConfigError, match=r"window = .*at least 1, or -1 for no window; .*left \+ 1"):
        Declared(window)
