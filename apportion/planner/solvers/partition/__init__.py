"""Partition solvers: assign weighted items to bins."""
