"""`apportion demo`: trains a small transformer under plans that a server streams, and without plans."""
