"""Groups of ranks that split heads."""
