"""`apportion demo`: trains a small transformer with plans that a server streams, and without plans."""
