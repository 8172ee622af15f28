"""A rank's memory: arrays, arenas, messages of rounds."""
