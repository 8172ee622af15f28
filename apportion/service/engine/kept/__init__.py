"""What the engine keeps: jobs, epochs and iterations, their records, and plans by their content address."""
