"""Blend: the densest and the sparsest documents mixed on each rank."""
