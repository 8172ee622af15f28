"""How a tile travels from its home to the ranks that need it."""
