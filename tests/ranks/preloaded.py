"""Modules that a forkserver imports once for all ranks. Triton decides on import whether kernels are interpreted, which
is the only way to run them without CUDA."""

from __future__ import annotations

import os

import torch

if torch.version.cuda is None:
    os.environ["TRITON_INTERPRET"] = "1"
    import tests.ranks.cases

    del os.environ["TRITON_INTERPRET"]

import tests.ranks.jobs_own_loop  # noqa: F401  # with the trainer's modules
