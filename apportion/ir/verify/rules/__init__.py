"""Verifier rules that the walk over programs does not prove, and coverage, for which it prepares the data."""
