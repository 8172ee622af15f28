"""How plans, slices, iterations and requests are stored and sent: `schemas/FORMAT.md`."""
