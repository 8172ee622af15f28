"""The commands, a file each or for a few that belong together."""
