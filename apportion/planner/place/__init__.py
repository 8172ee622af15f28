"""Placement strategies, one file or folder each: a home rank for every block."""
