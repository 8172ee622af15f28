"""Partition solvers: weighted items to bins."""
