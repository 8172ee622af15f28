"""Data types and their rules: requests, plans, byte and text formats, verification. Imports no other package."""
