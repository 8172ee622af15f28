"""A server from start to end: its process, its socket, its log, and one that stands by."""
