"""Grouping solvers: form groups of ranks and assign sequences to them."""
