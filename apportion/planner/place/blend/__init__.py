"""Blend placement: dense and sparse documents mixed on each rank."""
