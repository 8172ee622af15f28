"""What a training step takes: attention simulated, all else by closed forms, each with its source.

batches × parallelisms ──plan, simulate──► attention ──layers, traffic, schedule──► Step ──scenarios──► Row
"""
