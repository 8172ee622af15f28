"""Profile on the ranks of a job: links between them, and kernels on all ranks at once, since they share a machine's
memory and power in training; rank 0's figures are used."""

from __future__ import annotations

from apportion.backends.torch.profile.device import ProfileScope, Progress, profile
from apportion.backends.torch.profile.links import profile_links, with_links
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.trainer.measure.bench import process_group
from apportion.trainer.step.attention import Communicator


def run(
    quick: bool,
    name: str,
    progress: Progress | None = None,
    engine: str = "flash",
    model: Model | None = None,
    tokens: int | None = None,
) -> Hardware | None:
    """Measures the hardware; returns it on rank 0, None on the others. Links, posting and contention are measured if
    torchrun started several ranks, else assumed. engine: see `profile`; model, tokens: see `ProfileScope.of`.
    Raises ConfigError, ExecutionError."""
    with process_group() as device:
        communicator = Communicator()
        links = profile_links() if communicator.ranks > 1 else None
        effort = ProfileScope.of(device, quick, model, tokens)
        report_progress = progress if communicator.rank == 0 else None
        hardware = profile(quick, report_progress, name=name, device=device, effort=effort, engine=engine)
        if communicator.rank:
            return None
        return hardware if links is None else with_links(hardware, links)
