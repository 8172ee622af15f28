"""What goes in and out over HTTP: bodies, their models, problems, and the documents that describe them."""
