"""DistCA placement: attention disaggregated from the ranks of the tokens (sections 4 and 8, appendices A and B)."""
