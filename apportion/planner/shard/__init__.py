"""The token axis cut into blocks."""
