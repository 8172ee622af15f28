"""Rows of a table of one rank, as bytes: what each column is above what a reader expects (FORMAT.md, 4)."""
