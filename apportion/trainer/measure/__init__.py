"""What runs on the ranks of a job to check and to time it: selftest, bench, profile."""
