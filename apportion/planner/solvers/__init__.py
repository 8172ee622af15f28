"""Solvers for abstract problems: arrays in, arrays out, with a status and a bound.

`registry` lists them, `contracts` defines the kinds, `apportion.testing` checks new ones.
"""
