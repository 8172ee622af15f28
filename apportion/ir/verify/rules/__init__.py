"""The nine rules of the verifier, each from a finished plan."""
