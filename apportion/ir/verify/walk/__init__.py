"""Correctness proof of programs: one compiled walk over each rank."""
