"""Edge colouring: splits a bipartite multigraph into matchings."""
