"""DistCA: attention disaggregated from the ranks that hold the tokens (sections 4 and 8, appendices A and B)."""
