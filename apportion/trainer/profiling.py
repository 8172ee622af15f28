"""A profile on the ranks of a job: links by all ranks, kernels by rank 0 while the others wait."""

from __future__ import annotations

from apportion.backends.torch.profile import Progress, profile, profile_links, with_links
from apportion.ir.hardware import Hardware
from apportion.trainer.attention import Communicator
from apportion.trainer.selftest import process_group


def run(quick: bool, name: str, progress: Progress | None = None, engine: str = "flash") -> Hardware | None:
    """The hardware on rank 0, None on the others. Links are measured where torchrun started several ranks, and stay
    the assumed ones where there is one. engine: as of `profile`. Raises ConfigError, ExecutionError."""
    with process_group() as device:
        ranks = Communicator()
        links = profile_links() if ranks.ranks > 1 else None
        if ranks.rank:
            return None
        measured = profile(quick, progress, name=name, device=device, engine=engine)
        return measured if links is None else with_links(measured, links)
