"""Attention tasks, and the tiles and rows that they need."""
