"""Tests, by the folder of the package that they are about; helpers are imported from here: `tests.ranks.loading`."""
