"""DCP: blocks and their computation placed by hypergraph partitioning (sections 4 and 5)."""
