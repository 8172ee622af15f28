"""A bipartite multigraph into matchings."""
