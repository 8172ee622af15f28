"""The loader: plans from a source, samples from a dataset, and of both this rank's rows."""
