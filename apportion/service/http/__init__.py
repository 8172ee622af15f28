"""HTTP: the engine's verbs as FastAPI routes, slices and streams as one plain ASGI handler."""
