"""The release number, recorded in every plan."""

__version__ = "0.2.0"
