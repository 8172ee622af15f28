"""Functions that training steps call: attention, ping-pong of two halves, projections, loss, sums of gradients."""
