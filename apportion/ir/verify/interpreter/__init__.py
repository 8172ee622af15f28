"""Programs executed on cells of memory: what each row holds, and when."""
