"""Routes of tiles from their homes to the ranks that need them."""
