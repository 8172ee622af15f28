"""The planning pipeline: steps in order, checks between them, and the report."""
