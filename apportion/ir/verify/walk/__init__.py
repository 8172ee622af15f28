"""The quick judge: one compiled walk over each rank, which says that all is right, or that it does not know."""
