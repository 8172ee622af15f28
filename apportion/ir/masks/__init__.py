"""Masks: user-facing specs, and the bands that they lower to."""
