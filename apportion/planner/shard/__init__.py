"""Sharding: cuts the token axis into blocks."""
