"""The rules of the verifier that the walk over programs does not prove, and coverage, which it prepares."""
