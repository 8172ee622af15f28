"""Masks: what a user declares, and the bands that it lowers to."""
