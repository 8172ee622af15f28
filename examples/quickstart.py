"""The example of the README. Run: python examples/quickstart.py"""

import apportion as ap

batch = ap.Batch.from_lengths([60_000, 20_000, 9_000, 5_000, 3_000, 1_500, 700, 1], mask=ap.masks.causal())
cluster = ap.Cluster(nodes=1, ranks_per_node=8)
model = ap.Model(q_heads=32, kv_heads=8, head_dim=128, dtype="bf16", layers=32)
plan = ap.plan(batch, cluster, model, recipe="fcp", seed=0)  # verified before it is returned
assert plan == ap.Plan.decode(plan.encode())
piece = plan.for_rank(3)  # what rank 3 receives; it proves that it belongs to this plan
print(plan.report["imbalance"], plan.report["slots"], len(piece.encode()))
print(plan.layout("attention").to_cu_seqlens(rank=3))
