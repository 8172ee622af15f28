"""The planner: passes, solvers, recipes, bounds, forecasts and simulation."""
