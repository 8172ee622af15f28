"""The page at `/`: what runs, what workers do, what failed, as it happens; a click on an iteration opens its report."""
