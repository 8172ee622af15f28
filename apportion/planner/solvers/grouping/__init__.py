"""Groups of ranks, and sequences to groups."""
