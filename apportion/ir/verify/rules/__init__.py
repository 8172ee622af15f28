"""Verifier rules that the walk over programs does not prove; `coverage` uses data of the walk."""
