"""From tasks, routes and rounds to the programs of all ranks."""
