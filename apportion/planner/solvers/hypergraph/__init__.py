"""Hypergraph partitioning."""
