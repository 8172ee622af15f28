"""From a batch to a plan: passes, solvers, recipes, bounds."""
