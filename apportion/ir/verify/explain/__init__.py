"""Explanations of refused programs."""
