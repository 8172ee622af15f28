"""What a training step calls: attention, two halves in turn, projections, the loss, sums of gradients."""
