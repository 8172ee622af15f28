"""The inputs that the plans of a training run depend on, as plain data, and the first difference between two."""

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
    array = np.ascontiguousarray(lengths, "<i8")
    return {
        "job": json.loads(json.dumps(job.to_data())),
        "lengths": digest(array.tobytes()).hex(),
        "masks": masks_digest(masks),
        "shuffle": None if sampling is None else sampling.shuffle,
    }


def masks_digest(masks: Masks) -> str:
    """A digest, in hex, that is equal for masks that make equal batches."""
    return digest(wire.encode_section(_masks_data(masks))).hex()


def difference(stored: Any, requested: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """(field name, stored value, requested value) of the first difference between two values of plain data."""
    if not (isinstance(stored, Mapping) and isinstance(requested, Mapping)):
        return None if stored == requested else (name, stored, requested)
    for key in [*stored, *(key for key in requested if key not in stored)]:
        mismatch = difference(stored.get(key), requested.get(key), f"{name}.{key}".lstrip("."))
        if mismatch is not None:
            return mismatch
    return None


def _masks_data(masks: Masks) -> list[Any]:
    if masks is None or isinstance(masks, Mask | Mapping):
        return [_mask_data(masks)]
    entries = [_mask_data(spec) for spec in masks]
    return entries[:1] if all(data == entries[0] for data in entries) else entries


def _mask_data(spec: MaskSpec | None) -> dict[str, Any]:
    by_kind = spec if isinstance(spec, Mapping) else {DEFAULT_KIND: causal() if spec is None else spec}
    return {kind: to_data(by_kind[kind]) for kind in sorted(by_kind)}
