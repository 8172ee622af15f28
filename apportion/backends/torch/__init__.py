"""Executes plans on torch tensors: one process per rank, torch.distributed between them, gloo or NCCL."""
