"""Attention of one task on torch's kernels."""
