"""The README's example. Run: python examples/quickstart.py"""

import apportion as ap

lengths = [120_000, 60_000, 30_000, 20_000, 12_000, 6_000, 2_500, 571, 1]
batch = ap.Batch.from_lengths(lengths, mask=ap.masks.causal())
cluster = ap.Cluster(nodes=1, ranks_per_node=8)
model = ap.Model(q_heads=32, kv_heads=8, head_dim=128, dtype="bf16", layers=32)
plan = ap.plan(batch, cluster, model)  # verified before it is returned
part = plan.for_rank(3)  # rank 3's slice, with a proof that it belongs to this plan
print({name: round(share, 4) for name, share in plan.report["imbalance"].items()})
print(plan.report["slots"], "slots;", len(part.encode()), "bytes for rank 3")
print(plan.layout("attention").to_cu_seqlens(rank=3)[:6])
