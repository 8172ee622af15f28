"""Grouping solvers: group sizes of ranks, and sequences to groups."""
