"""Tests, arranged like the folders of the package; helpers are imported from here, like `tests.ranks.loading`."""
