"""Iterations: microbatches, requests of jobs, their compact form, halves and pipeline ticks."""
