"""Schedules: transfers in slots and rounds."""
