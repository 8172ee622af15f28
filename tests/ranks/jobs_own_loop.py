"""Rank pool jobs with custom losses and models: correct ones, and faulty ones that would train wrongly."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.func import functional_call
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import apportion as ap
from apportion import ApportionError, Communicator, PlannedLoader, Recurrent
from tests.ranks.loading import MODEL, Recorded, job, planning

RECURRENT = Recurrent(heads=2, key_heads=1, key_dim=4, value_dim=8, conv=3)
TABLE = torch.randn(800, 1, generator=torch.Generator().manual_seed(0))  # of positions
KINDS = {"far": ap.masks.causal(), "near": ap.masks.sliding_window(4)}


class Own(nn.Module):
    """A custom model with planned attention. variant: a fault or a correct variant of its other layers."""

    kept: Tensor | None = None
    counts: Tensor

    def __init__(self, variant: str, kinds: tuple[str | None, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.variant, self.kinds = variant, kinds
        self.table, self.head = nn.Embedding(800, 24), nn.Linear(24, 800)
        self.places = nn.Embedding(200, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 32) for _ in kinds)
        self.out = nn.Linear(16, 24)
        self.norm = nn.BatchNorm1d(24)
        self.window = nn.Parameter(torch.randn(24, 3) / 2)  # of a convolution
        self.decay = nn.Linear(24, 2)
        self.register_buffer("counts", torch.zeros(24))
        if variant.startswith("begins at zero"):
            self.gate = nn.Parameter(torch.zeros(()))
            self.rows = nn.Parameter(torch.zeros(100, 24))
        if variant == "kept statistics":
            self.norm.eval()

    def embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden: Tensor = self.table(tokens)
        if self.variant.startswith("rows as places"):
            hidden = hidden + self.places(torch.arange(len(tokens)) % 200)
        if self.variant == "begins at zero: rows as places":
            hidden = hidden + self.rows[: len(tokens)] * (1 + self.gate)
        if self.variant == "begins at zero: mean":
            hidden = hidden + self.gate * hidden.mean(0) + self.rows[positions]
        if self.variant == "kept places":
            if self.kept is None or len(self.kept) != len(positions):
                self.kept = positions
            hidden = hidden + self.places(self.kept)
        if self.variant == "noise":
            hidden = hidden + float(np.random.default_rng().normal())
        if self.variant == "largest position from 50 on" and positions.max() >= 50:
            hidden = hidden * (1 + positions.max())
        if self.variant == "largest position":
            hidden = hidden * (1 + positions.max())
        if self.variant == "places":
            hidden = hidden + self.places(positions)
        if self.variant.startswith("table"):
            hidden = hidden + positions
        return hidden

    def forward(self, tokens: Tensor, positions: Tensor, attention: Any) -> Any:
        hidden = self.embedded(tokens, positions)
        if self.variant == "counted":
            self.counts += hidden.detach().sum(0)
        for number, (layer, kind) in enumerate(zip(self.layers, self.kinds, strict=True)):
            if self.variant == "checkpointed":
                hidden = checkpoint(self.layer, hidden, number, layer, kind, attention, use_reentrant=False)
            else:
                hidden = self.layer(hidden, number, layer, kind, attention)
        if self.variant == "rows behind":
            hidden = hidden + hidden.roll(1, 0)
        logits: Tensor = self.head(hidden)
        if self.variant == "hidden states":
            return hidden, logits, hidden[:, 0]
        return {"logits": logits} if self.variant == "dict" else logits

    def layer(self, hidden: Tensor, number: int, layer: Any, kind: str | None, attention: Any) -> Tensor:
        if self.variant in ("statistics", "kept statistics"):
            hidden = self.norm(hidden)
        if self.variant == "mean":
            hidden = hidden + hidden.mean(0)
        if self.variant == "dropout":
            hidden = nn.functional.dropout(hidden, 0.2)
        if self.variant == "recurrent":
            decay, beta = nn.functional.logsigmoid(self.decay(hidden)), hidden[:, :2].sigmoid()
            hidden = hidden + self.out(attention.recur(hidden, self.window, decay, beta).flatten(1))
        q, k, v = layer(hidden).view(-1, 4, 8).split((2, 1, 1), 1)
        if self.variant == "attention beside" and number:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            outputs = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return hidden + self.out(outputs[0].transpose(0, 1).flatten(1))
        return hidden + self.out(attention(q, k, v, kind=kind).flatten(1))


class Body(nn.Module):
    """The layers of a model without embedding and head."""

    def __init__(self, own: Own) -> None:
        super().__init__()
        self.layers, self.out, self.run = own.layers, own.out, own.layer

    def forward(self, hidden: Tensor, attention: Any) -> Tensor:
        for number, layer in enumerate(self.layers):
            hidden = self.run(hidden, number, layer, None, attention)
        return hidden


class Weighted(Recorded):
    """A dataset with a weight per sample or per token."""

    def __init__(self, whole: bool, name: str = "worth") -> None:
        super().__init__()
        self.whole, self.name = whole, name

    def __getitem__(self, index: int) -> Any:
        ids = super().__getitem__(index)
        sample_weights = index + 0 * ids if self.whole else ids % 7 + 1
        return {"input_ids": ids, self.name: sample_weights.astype("float32")}


def _loss(logits: Tensor, b: Any, loss_kind: str, averaged_over: int, ranks: int, model: Own) -> Tensor:
    valid, sample_weights = b.valid_tokens, b.fields.get("worth")
    total = cross_entropy(logits, b.labels, reduction="sum")
    if loss_kind == "mean of rows":
        return cross_entropy(logits, b.labels)
    if loss_kind == "mean of rows over microbatches":
        return cross_entropy(logits, b.labels) / 2
    if loss_kind.startswith("a term apart"):
        logits.square().mean().backward(retain_graph=True)
    if loss_kind in ("own", "own, unweighted"):
        return total / valid
    if loss_kind == "own times ranks":
        return total * ranks / valid
    if loss_kind == "another":
        return mse_loss(logits, logits.detach() + 1, reduction="sum") / valid
    if loss_kind == "own weights":
        return (cross_entropy(logits, b.labels, reduction="none") * sample_weights).sum() / valid
    if loss_kind == "own and a term":
        return total / valid + model.out.weight.square().sum()
    labels = b.labels.clone()
    if loss_kind.startswith("labels further on"):
        further = b.roll(b.labels)
        count = (further >= 0).sum().double()
        dist.all_reduce(count, group=b.handle.communicator._groups[0])
        count = valid if loss_kind.endswith("of the iteration") else count
        return ap.normalised_loss(logits, further, count) + ap.normalised_loss(logits, b.labels, valid)
    if loss_kind.endswith("rows behind"):
        labels[:-1] = (b.tokens if loss_kind.startswith("tokens") else b.labels)[1:]
    if loss_kind in ("labels left out", "labels changed"):
        (labels if loss_kind == "labels left out" else b.labels)[-4:] = -100
    if loss_kind in ("labels left out", "tokens of rows behind", "labels of rows behind"):
        return ap.normalised_loss(logits, labels, valid)
    if loss_kind == "weights of a rank shifted":
        sample_weights, valid = sample_weights / sample_weights.mean(), b.total_weight
    sample_weights = sample_weights.double() if loss_kind == "weights in double" else sample_weights
    share = ap.normalised_loss(logits, b.labels, valid, averaged_over, sample_weights)
    share = share / (b.labels >= 0).sum() if loss_kind == "mean of shares" else share
    return share + logits.square().mean() if loss_kind == "and a term" else share


def trained(comm: Communicator, loop: dict[str, Any], second: bool = False) -> str:
    """The error or warning of a loop; "" if there is none. second: whether a correct loop runs first in this
    process."""
    logged = list[str]()
    logs = logging.Handler(logging.WARNING)
    logs.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("apportion").addHandler(logs)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            if second:
                train(comm)
            train(comm, **loop)
        except (ApportionError, UserWarning) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            logging.getLogger("apportion").removeHandler(logs)
    return "".join(logged)


def weights(comm: Communicator, net: str, checks_model: bool) -> list[str]:
    """Digests of a loop's final weights. checks_model: whether its model is checked first."""
    reduces = "fsdp summed" if net == "fsdp" else "sums"
    state = train(comm, net=net, checks_model=checks_model, reduces=reduces).state_dict()
    tensors = [one.full_tensor() if isinstance(one, DTensor) else one for one in state.values()]
    return [sha256(one.numpy().tobytes()).hexdigest() for one in tensors]


def train(
    comm: Communicator,
    loss: str = "",
    net: str = "",
    reduces: str = "sums",
    kinds: tuple[str | None, ...] = (None, None),
    checks_model: bool = True,
    scaled: float = 1.0,
) -> Own:
    """Trains. reduces: how gradients are reduced; with "apart", each rank has its own plans. scaled: the scale of a
    GradScaler."""
    model = Own(net, kinds)
    model.mixes_rows = not checks_model
    if net == "head alone":
        model.requires_grad_(False)
        model.head.requires_grad_(True)
    if net == "frozen":
        model.table.requires_grad_(False)
    if net == "hooked":
        model.head.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    wrapped = _wrapped(model, comm, net, reduces)
    shape = MODEL if kinds[0] is None else replace(MODEL, layers={"far": 1, "near": len(kinds) - 1})
    shape = replace(shape, dtype="bf16") if net in ("bf16", "autocast") else shape
    shape = replace(shape, recurrent={"linear": RECURRENT}) if net == "recurrent" else shape
    plan_comm = comm
    if reduces == "apart":
        plan_comm = Communicator(dist.new_group([comm.rank], use_local_synchronization=True))
    options = planning(replace(job(plan_comm.ranks, 66, 2), model=shape))
    if kinds[0] is not None:
        options["masks"] = KINDS
    data = Weighted(loss == "weights of samples") if "weights" in loss else Recorded()
    data = Weighted(False, "loss_weights") if loss == "own, unweighted" else data
    if loss.endswith("shifted"):
        options["shifted"] = ("labels", "worth")
    trained_params = [one for one in model.parameters() if one.requires_grad or net == "frozen"]
    if net == "master copies":
        trained_params = [nn.Parameter(one.detach().clone()) for one in trained_params]
    optimizer = _optimizer(trained_params, comm, net)
    scaler = torch.amp.GradScaler("cpu", init_scale=scaled, enabled=scaled != 1)
    averaged_over = {"over": comm.ranks, "more": comm.ranks + 1}.get(reduces[-4:], 1)
    torch.manual_seed(comm.rank)
    order = {
        "shuffle": False,
        "rows_multiple": 64 if net in ("tensor parallel", "kept places") else 2,
    }  # equal rows on its ranks
    for _ in range(2):
        for b in PlannedLoader(data, **options, communicator=plan_comm, **order):
            if net == "reduced early":
                wrapped.set_requires_gradient_sync(not b.is_last)
            if net == "compiled step":
                torch.compile(_share, backend="eager", dynamic=True)(wrapped, b).backward()
            else:
                share = _loss(_logits(wrapped, net, b), b, loss, averaged_over, comm.ranks, model)
                scaler.scale(share).backward()
            optimizer.zero_grad() if net == "zeroed early" and not b.is_last else None
            if b.is_last:
                if net == "evaluated":
                    list(PlannedLoader(data, **options, communicator=plan_comm))
                if reduces in ("sums", "apart"):
                    ap.sum_gradients(model, comm._base)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return model


def _optimizer(params: list[nn.Parameter], comm: Communicator, net: str) -> Any:
    if net == "sharded optimizer":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of scripts that torch compiles at import
            from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(params, torch.optim.SGD, comm._base, lr=0.1)
    return torch.optim.SGD(params, lr=0.1 + 0.01 * comm.rank * (net == "rates of ranks"))


def _share(model: Any, b: Any) -> Tensor:
    logits = model(b.tokens, b.position_ids, lambda q, k, v, kind: ap.planned_attention(q, k, v, b.handle))
    return ap.normalised_loss(logits, b.labels, b.valid_tokens)


def _logits(model: Any, net: str, b: Any) -> Tensor:
    def attention(q: Tensor, k: Tensor, v: Tensor, kind: Any) -> Any:
        if net == "places in closure":
            q = q * (1 + b.position_ids[:, None, None] / 100)
        window_option = {"window": {"near": 4, "far": -1}[kind]} if net == "windows" else {}
        return ap.planned_attention(q, k, v, b.handle, kind, **window_option)

    def recur(hidden: Tensor, window: Tensor, decay: Tensor, beta: Tensor) -> Any:
        q, k, v = ap.planned_conv(hidden, window, b.handle).split((4, 4, 16), 1)
        rows = q.view(-1, 1, 4), k.view(-1, 1, 4), v.view(-1, 2, 8)
        return ap.planned_scan(None, *rows, decay, beta, b.handle)

    attention.recur = recur  # type: ignore[attr-defined]
    if net == "taught":
        with torch.no_grad():
            Own("rows as places", model.kinds)(b.tokens, b.position_ids, attention)
    if net == "functional":
        hidden = model.table(b.tokens)
        for layer in model.layers:
            q, k, v = layer(hidden).view(-1, 4, 8).split((2, 1, 1), 1)
            hidden = hidden + model.out(attention(q, k, v, None).flatten(1))
        return model.head(hidden)
    if net == "functional call":
        model.copies = {name: one.detach().requires_grad_() for name, one in model.named_parameters()}
        for name, one in model.named_parameters():
            model.copies[name].register_hook(partial(setattr, one, "grad"))
        return functional_call(model, model.copies, (b.tokens, b.position_ids, attention))
    if net == "body":
        return model.head(Body(model)(model.table(b.tokens), attention))
    with torch.autocast("cpu", torch.bfloat16, net == "autocast"):
        places = torch.arange(len(b.tokens)) if net in ("places of rows", "table of rows") else b.position_ids
        places = TABLE[places] if net.startswith("table") else places
        outputs = model(b.tokens, places, attention)
    if isinstance(outputs, tuple):
        return outputs[1]
    return outputs["logits"] if isinstance(outputs, dict) else outputs


def _wrapped(model: Own, comm: Communicator, net: str, reduces: str) -> Any:
    wrapped: Any = model
    if net == "tensor parallel":  # over the ranks of the plan
        mesh, rows = DeviceMesh.from_group(comm._base, "cpu"), RowwiseParallel(input_layouts=Replicate())
        parallelize_module(model, mesh, {"out": rows})
    if reduces.startswith("ddp"):
        wrapped = DistributedDataParallel(model, process_group=comm._base, find_unused_parameters=True)
    if reduces == "fsdp1":
        options = {"device_id": torch.device("cpu"), "use_orig_params": True}
        return fsdp.FullyShardedDataParallel(model, comm._base, fsdp.ShardingStrategy.NO_SHARD, **options)
    if reduces.startswith("fsdp"):
        low = fsdp.MixedPrecisionPolicy(torch.bfloat16) if net == "bf16" else fsdp.MixedPrecisionPolicy()
        wrapped = fsdp.fully_shard(model, mesh=DeviceMesh.from_group(comm._base, "cpu"), mp_policy=low)
    if net.endswith("compiled"):
        wrapped = torch.compile(wrapped, backend="aot_eager", dynamic=True)
    return ap.sum_gradients(wrapped) if reduces.endswith("summed") else wrapped


def one_sided(comm: Communicator) -> list[list[list[float]] | None]:
    """The summed gradients of a layer that only rank 0 uses, and of one that no rank uses."""
    layers = nn.ModuleList(nn.Linear(2, 1, bias=False) for _ in range(2))
    if comm.rank == 0:
        layers[0](torch.ones(3, 2)).sum().backward()
    ap.sum_gradients(layers, comm._groups[0])
    return [None if one.grad is None else one.grad.tolist() for one in layers.parameters()]


def with_no_rows_at_last(comm: Communicator) -> int:
    """Trains an iteration whose last microbatch has one token; returns this rank's rows of it."""
    model, options = Own("", (None, None)), planning(replace(job(2, 100, 2), model=MODEL))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for b in PlannedLoader(Recorded(), **options, communicator=comm, sampler=[[[5, 0], [3]]]):
        _loss(_logits(model, "", b), b, "", 1, 2, model).backward()
    ap.sum_gradients(model, comm._base)
    optimizer.step()
    return len(b.tokens)


def updated_by_hand(comm: Communicator, iterations: int) -> list[str]:
    """The warnings of a loop without an optimizer."""
    model, options = Own("", (None,)), planning(replace(job(2, 10), model=MODEL))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for b in PlannedLoader(Recorded(), **options, communicator=comm, sampler=[[[1]]] * iterations):
            _loss(_logits(model, "", b), b, "", 1, 2, model).backward()
            with torch.no_grad():
                for one in model.parameters():
                    one -= 0 if one.grad is None else 0.1 * one.grad
    return [str(one.message) for one in caught]


def unfrozen(comm: Communicator) -> None:
    """Unfreezes a parameter, which DDP does not reduce, after step 2; steps 1, 2 and 4 would be compared anyway."""
    model = Own("", (None, None))
    model.table.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = _wrapped(model, comm, "", "ddp summed")
    for step in range(3):
        model.table.requires_grad_(step == 2)
        for b in PlannedLoader(
            Recorded(), **planning(replace(job(2, 66, 2), model=MODEL)), communicator=comm
        ):
            _loss(_logits(wrapped, "", b), b, "", 1, 2, model).backward()
        optimizer.step()
        optimizer.zero_grad()


def one_stepped(comm: Communicator) -> list[list[float]]:
    """The summed gradient of a layer in its second step; a second layer has kept its sums from the first."""
    layers = nn.ModuleList(nn.Linear(2, 1, bias=False) for _ in range(2))
    for count in (2, 1):
        layers[0].zero_grad()
        torch.stack([layer(torch.ones(3, 2)).sum() for layer in layers][:count]).sum().backward()
        ap.sum_gradients(layers, comm._groups[0])
    first: Any = layers[0]
    return first.weight.grad.tolist()
