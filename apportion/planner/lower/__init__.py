"""Lowering: from tasks, routes and rounds to the programs of all ranks."""
