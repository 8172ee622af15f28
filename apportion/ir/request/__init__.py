"""What is asked: batch, cluster, model, hardware, policy."""
