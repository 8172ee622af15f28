"""Plans: layouts and programs as tables, and quantities derived from them."""
