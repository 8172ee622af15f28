"""Zeppelin: sequences by zones, in three queues of rings (section 3)."""
