"""Planned attention in trainers: adapters and prefix trees; the subpackages hold the parts that adapters share."""
