"""`apportion demo`: a small transformer trained under plans and without."""
