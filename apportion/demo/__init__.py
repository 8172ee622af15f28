"""`apportion demo`: a small transformer trained under plans that a server streams, and without."""
