"""Commands about a planning service and what it keeps."""
