"""Hot loops: how they are compiled, and what many of them need."""
