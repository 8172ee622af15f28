"""What is answered: layouts and programs as tables, and what follows from them."""
