"""Executes plans on torch tensors: one process per rank, torch.distributed over gloo or NCCL."""
