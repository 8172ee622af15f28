"""Strategies as data, and the passes that they name."""
