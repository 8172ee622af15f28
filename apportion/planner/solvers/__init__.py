"""Solvers know numbers, not attention: arrays in, arrays out, with a status and a bound.

`registry` lists them, `contracts` says what each kind takes and gives, `apportion.testing` checks a new one.
"""
