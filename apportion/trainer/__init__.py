"""Planned attention in trainers: here an adapter for each, and prefix trees; below, what adapters are made of."""
