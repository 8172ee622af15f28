"""The steps of a plan in their order, what must hold between them, and the report."""
