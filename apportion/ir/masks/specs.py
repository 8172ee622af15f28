"""The mask specs by name: constructors, and conversion to and from plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from numpy.typing import ArrayLike

from apportion.ir.errors import ConfigError, UnknownNameError
from apportion.ir.fields import known, suggestion
from apportion.ir.masks.spec import Mask, check_nesting
from apportion.ir.masks.structures import Bands, Documents, ImageSpans, SharedQuestion, Slices, Tree
from apportion.ir.masks.windows import (
    BlockCausal,
    Causal,
    CausalBlockwise,
    Chunked,
    Full,
    PrefixLM,
    SinkWindow,
    SlidingWindow,
)

# ---- constructors


def causal() -> Causal:
    """j <= i."""
    return Causal()


def full() -> Full:
    """Every pair of the sequence."""
    return Full()


def sliding_window(window: int, right: int = 0) -> SlidingWindow:
    """`window` keys up to and including the token itself, and `right` keys after it."""
    return SlidingWindow(window, right)


def sink_window(sink: int, window: int) -> SinkWindow:
    """Causal, restricted to the first `sink` tokens and the `window` most recent ones."""
    return SinkWindow(sink, window)


def causal_blockwise(block: int, local: int, sink: int = 1, test: int = 1) -> CausalBlockwise:
    """Causal; all but the last `test` blocks see only the first `sink` blocks and keys at most `local` blocks back."""
    return CausalBlockwise(block, local, sink, test)


def shared_question(prompt: int, answers: Sequence[int]) -> SharedQuestion:
    """One prompt of `prompt` tokens, then answers of the given lengths that do not see each other."""
    return SharedQuestion(prompt, answers)  # type: ignore[arg-type]


def prefix_lm(prefix: int) -> PrefixLM:
    """Causal, and every token sees the first `prefix` tokens."""
    return PrefixLM(prefix)


def block_causal(chunk: int, window: int | None = None) -> BlockCausal:
    """Each chunk sees itself and the chunks before it: `window` chunks including itself, or all if None."""
    return BlockCausal(chunk, window)


def chunked(chunk: int) -> Chunked:
    """Causal inside chunks of `chunk` tokens."""
    return Chunked(chunk)


def image_spans(spans: Sequence[Sequence[int]], mask: Mask | None = None) -> ImageSpans:
    """`mask` (default: causal), with the spans [start, end) bidirectional."""
    return ImageSpans(spans, causal() if mask is None else mask)  # type: ignore[arg-type]


def tree(nodes: Sequence[Sequence[int]]) -> Tree:
    """Nodes [parent or -1, length], parents first."""
    return Tree(nodes)  # type: ignore[arg-type]


def documents(lengths: Sequence[int], mask: Mask | None = None) -> Documents:
    """A pack of documents, each under `mask` (default: causal)."""
    return Documents(lengths, causal() if mask is None else mask)  # type: ignore[arg-type]


def bands(rows: ArrayLike) -> Bands:
    """Raw bands (q0, q1, k0, k1, dmin, dmax) on the sequence's own tokens."""
    return Bands(rows)  # type: ignore[arg-type]


def slices(rows: ArrayLike) -> Slices:
    """Raw slices (q0, q1, k0, k1, type) on the sequence's own tokens; type: FULL, CAUSAL, INVCAUSAL, BICAUSAL, or its
    number from 0."""
    return Slices(rows)  # type: ignore[arg-type]


# ---- data

SPECS: Mapping[str, type[Mask]] = MappingProxyType(
    {
        "causal": Causal,
        "full": Full,
        "sliding_window": SlidingWindow,
        "sink_window": SinkWindow,
        "causal_blockwise": CausalBlockwise,
        "shared_question": SharedQuestion,
        "prefix_lm": PrefixLM,
        "block_causal": BlockCausal,
        "chunked": Chunked,
        "image_spans": ImageSpans,
        "tree": Tree,
        "documents": Documents,
        "bands": Bands,
        "slices": Slices,
    }
)
_NAMES: Mapping[type[Mask], str] = MappingProxyType({spec: name for name, spec in SPECS.items()})
_RAW = MappingProxyType({"bands": "bands", "slices": "slices"})  # name of the field `rows` in plain data


def to_data(spec: Mask) -> dict[str, Any]:
    """Plain data {"name": {parameter: value}}; parameters with default values are omitted."""
    name = _NAMES[type(spec)]
    params = {}
    for item in fields(spec):
        value = getattr(spec, item.name)
        default = Causal() if item.name == "mask" else item.default
        if value != default:
            params[_RAW.get(name, item.name)] = _plain(value)
    return {name: params}


def _plain(value: Any) -> Any:
    if isinstance(value, Mask):
        return to_data(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def is_data(data: Any) -> bool:
    """True if `data` looks like one mask, {"name": {…}}, rather than {kind: {"name": {…}}}."""
    return _names_mask(data) and not _names_mask(next(iter(data.values())))


def _names_mask(data: Any) -> bool:
    if not isinstance(data, Mapping) or len(data) != 1:
        return False
    ((name, params),) = data.items()
    return name in SPECS and (params is None or isinstance(params, Mapping))


def from_data(data: Any, field: str = "mask", depth: int = 0) -> Mask:
    """Builds the spec from plain data {"name": {parameter: value}}. Raises ConfigError, UnknownNameError."""
    check_nesting(field, depth - 1)
    if not isinstance(data, Mapping) or len(data) != 1:
        raise ConfigError(
            field, data, "must name one mask", f'write {{"causal": {{}}}}; known: {", ".join(SPECS)}'
        )
    ((name, params),) = data.items()
    if not isinstance(name, str) or name not in SPECS:
        raise UnknownNameError(field, name, "unknown mask", suggestion(str(name)[:64], SPECS))
    return _build(SPECS[name], name, {} if params is None else params, f"{field}.{name}", depth)


def _build(spec: type[Mask], name: str, params: Any, field: str, depth: int) -> Mask:
    field_of = {_RAW.get(name, item.name): item for item in fields(spec)}
    required = [key for key, item in field_of.items() if item.default is item.default_factory]
    params = known(field, params, field_of, required)
    values = {field_of[key].name: value for key, value in params.items()}
    if "mask" in values:
        values["mask"] = from_data(values["mask"], f"{field}.mask", depth + 1)
    return spec(**values)


__all__ = [
    "Mask",
    "bands",
    "block_causal",
    "causal",
    "causal_blockwise",
    "chunked",
    "documents",
    "from_data",
    "full",
    "image_spans",
    "prefix_lm",
    "shared_question",
    "sink_window",
    "slices",
    "sliding_window",
    "to_data",
    "tree",
]
