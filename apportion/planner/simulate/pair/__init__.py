"""Simulation of two alternating halves of a batch (ping-pong)."""
