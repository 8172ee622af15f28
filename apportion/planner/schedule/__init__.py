"""Transfers in slots and rounds."""
