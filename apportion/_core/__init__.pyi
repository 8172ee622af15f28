"""The compiled core, from `core/`: a submodule for each area, which has a stub of its own here."""

checked: bool
