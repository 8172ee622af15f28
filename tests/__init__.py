"""Tests, arranged by the package folder that they test; helpers are imported from here: `tests.ranks.loading`."""
