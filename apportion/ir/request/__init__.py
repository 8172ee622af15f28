"""The planning request: batch, cluster, model, hardware, policy."""
