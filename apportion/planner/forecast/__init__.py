"""Forecast of training step times: attention is simulated, all else follows closed forms with cited sources.

batches × parallelisms ──plan, simulate──► attention ──layers, traffic, schedule──► Step ──scenarios──► Row
"""
