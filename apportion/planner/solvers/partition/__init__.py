"""Weighted items to bins."""
