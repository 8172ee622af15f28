"""A home rank for every block: one file or folder a strategy."""
