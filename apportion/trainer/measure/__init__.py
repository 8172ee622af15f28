"""Commands that run on the ranks of a job to check and time it: selftest, bench, profile."""
