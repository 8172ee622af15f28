"""The loss seam: local sum over global valid tokens, once per optimizer step."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy

#: the label of tokens that predict nothing, as torch has it
IGNORED = -100


def normalised_loss(logits: Tensor, labels: Tensor, valid_tokens: int, averaged_over: int = 1) -> Tensor:
    """This rank's share of the step's mean token loss: the shares of all ranks and microbatches sum to it.

    logits [rows, vocabulary], labels [rows] (IGNORED where there is nothing to predict), both already in this
    rank's row order; valid_tokens: `PlannedBatch.valid_tokens`, of all ranks and all microbatches of the
    optimizer step. averaged_over: the ranks over which the trainer averages gradients (DDP and FSDP do); 1
    where it sums them. A rank without tokens gets 0 with a gradient path, and runs backward like the others.
    """
    total = cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
    return total * (averaged_over / max(valid_tokens, 1))
