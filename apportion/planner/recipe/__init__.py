"""Recipes, which describe strategies as data, and the registry of passes."""
