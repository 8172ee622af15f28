"""Attention of one task on the kernels of torch."""
