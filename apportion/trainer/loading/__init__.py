"""The loader: combines plans from a source and samples from a dataset into this rank's rows."""
