"""What must be computed where, and the tiles and rows that it needs."""
