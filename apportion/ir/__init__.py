"""Pure data and its rules: what goes in, what comes out, and what a plan must hold. Knows nobody."""
