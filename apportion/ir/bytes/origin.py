"""The inputs that the plans of a training run depend on, as JSON-like data, and the difference between two of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from apportion.ir.bytes import wire
from apportion.ir.bytes.job import Job
from apportion.ir.hashing import digest
from apportion.ir.masks.spec import Mask
from apportion.ir.masks.specs import causal, to_data
from apportion.ir.request.sampling import Masks, MaskSpec, Sampling
from apportion.ir.request.sequences import DEFAULT_KIND


def origin(job: Job, lengths: ArrayLike, masks: Masks, sampling: Sampling | None) -> dict[str, Any]:
    """The job, with the seed; digests of the samples' lengths and masks, in hex; and the shuffling, None if a trainer
    sets its own order. lengths: integers [n]; masks: as `batches_of` takes them."""
    held = np.ascontiguousarray(lengths, "<i8")
    return {
        "job": json.loads(json.dumps(job.to_data())),
        "lengths": digest(held.tobytes()).hex(),
        "masks": digest(wire.encode_section(_masks_data(masks))).hex(),
        "shuffle": None if sampling is None else sampling.shuffle,
    }


def difference(held: Any, asked: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """(field name, held value, requested value) of the first difference between two values of plain data."""
    if not (isinstance(held, Mapping) and isinstance(asked, Mapping)):
        return None if held == asked else (name, held, asked)
    for key in [*held, *(key for key in asked if key not in held)]:
        found = difference(held.get(key), asked.get(key), f"{name}.{key}".lstrip("."))
        if found is not None:
            return found
    return None


def _masks_data(masks: Masks) -> list[Any]:
    """Plain data of masks, equal for masks that make equal batches."""
    if masks is None or isinstance(masks, Mask | Mapping):
        return [_mask_data(masks)]
    every = [_mask_data(spec) for spec in masks]
    return every[:1] if all(data == every[0] for data in every) else every


def _mask_data(spec: MaskSpec | None) -> dict[str, Any]:
    by_kind = spec if isinstance(spec, Mapping) else {DEFAULT_KIND: causal() if spec is None else spec}
    return {kind: to_data(by_kind[kind]) for kind in sorted(by_kind)}
