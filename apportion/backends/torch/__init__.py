"""Executes plans on torch tensors: one process per rank, torch.distributed over gloo or NCCL.

Registers all ops of `torch.ops.apportion`, as policies of selective checkpointing name them before they run.
"""

from apportion.backends.torch import autograd, recurrence

__all__ = ["autograd", "recurrence"]
