"""Solvers know numbers, not attention: arrays in, arrays out, with a status and a bound.

`registry` lists them, `contracts` says what each kind takes and gives, `kit` checks a new one.
"""
