"""Iterations: microbatches, requests of jobs, halves and pipeline ticks."""
