"""DCP placement: blocks and their computation by hypergraph partitioning (sections 4 and 5)."""
