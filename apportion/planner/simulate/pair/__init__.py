"""Two halves of a batch that take turns on every rank (ping-pong), simulated."""
