"""Byte formats of plans, slices, iterations and requests: `schemas/FORMAT.md`."""
