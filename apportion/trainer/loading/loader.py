"""Planned data loader: each rank's tokens, position ids and labels of a planned microbatch.

    sampler ──samples of an iteration──► Batch ──source: submit, plan──► slice of this rank ──► PlannedBatch
                                                     dataset ──only the samples that the rank holds──┘

The loader works the same for all sources: a service, a folder of precomputed plans, or a local process.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, closing
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict
from warnings import warn

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch.nn.functional import pad

from apportion.backends.torch.calls import by_value
from apportion.backends.torch.engines import ENGINES
from apportion.backends.torch.envelope import UNPADDED, Envelope
from apportion.backends.torch.feed import EncoderFeed
from apportion.backends.torch.handle import PlanHandle, agree
from apportion.backends.torch.transport import Communicator, Transport
from apportion.ir.arrays import Ints
from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.bytes.job import Job
from apportion.ir.bytes.origin import masks_digest, origin
from apportion.ir.errors import ConfigError, ExecutionError
from apportion.ir.fields import choice, flag, instance, integer, number
from apportion.ir.masks.bands import MAX_TOKENS
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.ir.request.policy import DEFAULT_RECIPE, Policy, Recipe
from apportion.ir.request.sampling import Masks, Sampling
from apportion.planner.recipe.recipes import find_recipe
from apportion.trainer.loading import arguments, fetching
from apportion.trainer.loading.agreement import Agreement, difference_error, failure_error, totals
from apportion.trainer.loading.batch import PlannedBatch
from apportion.trainer.loading.iterations import BatchBuilder, Draw, Iteration, Iterations, Place
from apportion.trainer.loading.media import Media, MediaOrder
from apportion.trainer.loading.metrics import NO_ROWS, Facts, Meters, differing_sample
from apportion.trainer.loading.rows import SHIFTED, Dataset, Form, Rows, rows_of
from apportion.trainer.loading.sources import Source, open_source
from apportion.trainer.step import wiring

if TYPE_CHECKING:
    from apportion.planner.iteration.ticks import TickTable


DISCARDS = (
    "set_epoch({}) discards the loaded place in epoch {}, so samples are read again: begin with that epoch"
)


class LoaderOptions(TypedDict, total=False):
    """Keyword arguments of `PlannedLoader`, for functions that pass them on."""

    source: str | Path | Sequence[str] | Source
    token: str | None
    ca: str | Path | None
    lengths: ArrayLike | None
    masks: Masks
    sampler: Iterable[Any] | None
    microbatches: int
    recipe: str | Mapping[str, Any] | Recipe | Policy | None
    seed: int | None
    hardware: Hardware | str | None
    shuffle: bool | None
    communicator: Communicator | None
    on_timeout: str
    timeout_s: float
    lookahead: int
    workers: int
    engine: str
    device: torch.device | str | None
    replicas: Transport | Any
    rows_multiple: int | None
    envelope: Envelope
    drop_last: bool
    shifted: Collection[str]
    ticks: TickTable | None
    kinds: Sequence[str] | None
    media: Media | None


class PlannedLoader:
    """Iterates over a dataset in planned microbatches; every rank creates one with equal arguments.

        for batch in ap.PlannedLoader(dataset, cluster, model, tokens_per_rank, source="http://127.0.0.1:8321"):

    dataset: map-style, see `Dataset`, with `lengths`, the tokens of each sample, integers [n], and optionally `masks`,
    one spec for all or one per sample (default causal); the arguments `lengths` and `masks` take precedence. A rank
    reads only samples of which it holds a part. shifted: fields of samples that belong to the predicted token, and are
    moved to the row that predicts it, like labels.

    cluster, model, tokens_per_rank of a microbatch, microbatches of an iteration, recipe and hardware: as in `Job`; a
    `Policy` as recipe has more options. seed: of plans and of the order of the samples, by default the policy's.

    source: of plans. "local": a local process. A URL, or a list of them: equivalent planning servers, with their
    `token` (by default APPORTION_TOKEN of the environment), and for https `ca`, a PEM file of certificates, instead of
    the system's. A folder: plans from `apportion precompute`. Or a `Source`.

    sampler: yields for each iteration of a pass a list of microbatches of sample numbers, or a flat list of sample
    numbers (one microbatch, or a recipe that packs), the same on all ranks; may have `set_epoch(epoch)`. By default
    samples fill microbatches in an order drawn from `seed` and the epoch (`set_epoch`), or in order if `shuffle` is
    False. lookahead: iterations that rank 0 submits before they are needed; any rank submits a needed iteration that
    the source does not know. workers: torch data-loader processes that fetch plans and read samples; with
    0 a thread fetches plans, and samples are read on use.

    replicas: if several groups of ranks train together (data parallel over context parallel), a process group of the
    ranks in this rank's position in each; `communicator` has the ranks of its own group. Iterations of the default
    order are dealt to the groups in turn, and `valid_tokens` counts all groups. An incomplete last round is dropped; in
    a pass under `torch.no_grad()`, groups without an iteration run another's again, without labels, sample numbers and
    `samples`, so that an evaluation covers all samples.

    rows_multiple: every rank's rows are padded to a multiple of it, at least one; padding has no labels and changes
    neither loss nor gradients. envelope: sizes to which rows, and buffers and tables of calls, are padded, so that they
    are equal in all steps. drop_last: drops an iteration with fewer microbatches than the others.

    ticks: the table of a pipeline (`tick_table`), for `TickPipeline`: the cluster has the ranks of all stages, and the
    loader plans and yields ticks instead of microbatches, each of `tokens_per_rank` on the ranks of a stage; a last
    iteration with fewer microbatches is dropped. kinds: the attention kind of each virtual stage's layers, if there are
    several, as in `tick_batch`. recipe: by default that of `plan_tick`.

    media: images, videos or sound of the samples, for an encoder with its own plan, see `Media`: `batch.media` is
    then this rank's share of the encoder's rows, and `batch.feed` the argument of `move_rows`; both None if the
    microbatch has no media.

    engine: computes attention, see `PlanHandle`. device: by default this process' GPU if it has one, else the CPU;
    programs are loaded there before they are needed.

    on_timeout: if there is no plan after `timeout_s` seconds, "raise" PlanTimeoutError, or "local": in each iteration
    all ranks exchange which of them have the plan, the others plan it themselves, and all compare. Until a plan arrives
    again, the loader waits at most half a second for later ones. `metrics()` counts such iterations, and a warning is
    logged. The attribute `job` is the job of the plans.

    `state_dict` saves the loader's position, and `load_state_dict` resumes after the last batch that was yielded.

    Raises ConfigError; CapacityError for samples that do not fit; and the source's errors.
    """

    def __init__(
        self,
        dataset: Dataset,
        cluster: Cluster,
        model: Model,
        tokens_per_rank: int,
        *,
        source: str | Path | Sequence[str] | Source = "local",
        token: str | None = None,
        ca: str | Path | None = None,
        lengths: ArrayLike | None = None,
        masks: Masks = None,
        sampler: Iterable[Any] | None = None,
        microbatches: int = 1,
        recipe: str | Mapping[str, Any] | Recipe | Policy | None = None,
        seed: int | None = None,
        hardware: Hardware | str | None = None,
        shuffle: bool | None = None,
        communicator: Communicator | None = None,
        on_timeout: str = "raise",
        timeout_s: float = 300.0,
        lookahead: int = 8,
        workers: int = 0,
        engine: str = "auto",
        device: torch.device | str | None = None,
        replicas: Transport | Any = None,
        rows_multiple: int | None = None,
        envelope: Envelope = UNPADDED,
        drop_last: bool = False,
        shifted: Collection[str] = SHIFTED,
        ticks: TickTable | None = None,
        kinds: Sequence[str] | None = None,
        media: Media | None = None,
    ) -> None:
        self.dataset, self._sampler = dataset, arguments.sampler_of(sampler, shuffle)
        policy = (
            recipe if isinstance(recipe, Policy) else Policy(find_recipe(recipe or _default_recipe(ticks)))
        )
        policy = policy if seed is None else replace(policy, seed=seed)
        self.job = Job(cluster, model, policy, tokens_per_rank, microbatches, hardware)  # type: ignore[arg-type]
        self._masks_given = masks is not None
        masks, lengths = arguments.masks_of(dataset, masks), arguments.lengths_of(dataset, lengths)
        arguments.check_kinds(self.job, masks)
        stages, filled = 1, self.job.microbatches
        self._repeats = 1  # number of plans of an iteration that contain each token
        if ticks is not None:
            from apportion.planner.iteration.ticks import tick_job

            stages, filled, self._repeats = ticks.stages, ticks.microbatches, 2 * ticks.stages * ticks.virtual
            self.job = tick_job(self.job, ticks, kinds)
        self._builder = BatchBuilder(self.job, lengths, masks, ticks, kinds)
        self._sampling = None
        if sampler is None:
            order = self.job.policy.seed, shuffle is None or flag("shuffle", shuffle)
            self._sampling = Sampling(lengths, self.job.tokens // stages, filled, *order)
        self._timeout_s = number("timeout_s", timeout_s, exclusive=True)
        facts = origin(self.job, lengths, masks, self._sampling)
        self._source = open_source(source, token, ca, self._timeout_s, facts, self.job.digest)
        self._communicator = arguments.communicator_of(self.job, communicator)
        self._rank = self._communicator.rank
        self._replicas = arguments.replicas_of(replicas)
        self._group = (0, 1) if self._replicas is None else (self._replicas.rank, self._replicas.ranks)
        self._facts = {**facts, "groups": self._group[1]}  # for the state
        self._facts |= {} if ticks is None else {"ticks": [stages, filled, ticks.virtual]}
        packs = sampler is not None and self.job.packs  # then every iteration is filled
        self._least = filled if (flag("drop_last", drop_last) and not packs) or ticks is not None else 0
        multiple = None if rows_multiple is None else integer("rows_multiple", rows_multiple)
        self._form = Form(arguments.field_names(shifted), multiple, instance("envelope", envelope, Envelope))
        plans = choice("on_timeout", on_timeout, ("raise", "local")) == "local"
        self._agreement = Agreement(self._communicator, plans)
        self._workers = integer("workers", workers, 0)
        self._engine, self._device = choice("engine", engine, ("auto", *ENGINES)), arguments.device_of(device)
        self._lookahead = max(integer("lookahead", lookahead), fetching.PREFETCHED * self._workers + 1)
        self._begin = self._place = Place()  # of the next pass; of the next batch
        self._passes, self._meters = 0, Meters()
        self._left: tuple[Place, ...] = ()  # starts of the latest passes, each left before its end
        self._encoder: PlannedLoader | None = None
        self._leads = True  # False if it follows another loader's microbatches
        if media is not None:
            options: LoaderOptions = {"source": source, "token": token, "ca": ca, "timeout_s": timeout_s}
            options |= {"on_timeout": on_timeout, "workers": workers, "engine": engine, "device": device}
            self._add_encoder(media, cluster, {**options, "seed": seed, "lookahead": lookahead})

    def _add_encoder(self, media: Media, cluster: Cluster, options: LoaderOptions) -> None:
        """Creates the encoder's loader, whose microbatches follow this loader's. Raises ConfigError."""
        self._media = MediaOrder(instance("media", media, Media), self._builder)
        rule, remedy = "the media of each microbatch must be known in advance", "leave it out, or the media"
        refused = {"recipe.pack": self.job.packs, "ticks": self._builder.table is not None}
        refused["sampler"] = isinstance(self._sampler, Iterator)
        for name in filter(refused.__getitem__, refused):
            raise ConfigError(name, "with media", rule, remedy)
        options |= {"recipe": media.recipe, "hardware": media.hardware, "rows_multiple": 1}
        options |= {"sampler": self._media, "communicator": self._communicator}
        options["lookahead"] *= self.job.microbatches
        tokens_per_rank = MAX_TOKENS // cluster.ranks
        self._encoder = PlannedLoader(media, cluster, media.model, tokens_per_rank, **options)
        self._encoder._leads = False

    def __getitem__(self, index: Any) -> Any:
        """Raises ConfigError: a trainer that treats a loader as a dataset would collate and shard its batches."""
        remedy = "pass it to PlannedTrainer, or to PlannedBatches in Lightning"
        raise ConfigError("dataset", type(self).__name__, "yields planned batches, not samples", remedy)

    def metrics(self) -> dict[str, Any]:
        """Metrics since the loader was created: iterations, tokens of all ranks and per second (within passes),
        waited_s: seconds spent waiting for plans, and fallbacks: iterations that some rank planned itself."""
        return {**self._meters.summary(), "fallbacks": self._agreement.fallbacks}

    def set_epoch(self, epoch: int, start: int | None = None) -> None:
        """Sets the epoch, and with it the order, of the next passes. The next pass begins with iteration `start`; by
        default where a loaded state of this epoch left off, or with the first iteration if there is none."""
        epoch = integer("epoch", epoch, 0)
        if start is None and epoch < self._begin.epoch and self._begin > Place(self._begin.epoch):
            warn(DISCARDS.format(epoch, self._begin.epoch), stacklevel=2)
        if start is not None or epoch != self._begin.epoch:
            self._begin = self._place = Place(epoch, integer("start", start or 0, 0))

    def state_dict(self) -> dict[str, Any]:
        """The place of the next batch, and the values that must be equal to resume there: JSON-like data, equal on all
        ranks of the group."""
        return self._place.state(self._facts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next pass resume after the last batch yielded before the state was saved. Raises ConfigError
        if the dataset, the job or the order differs, naming the difference."""
        self._begin = self._place = Place.of(state, self._facts)

    def __len__(self) -> int:
        """The microbatches of a pass. Raises TypeError for a sampler without a length, which may be endless."""
        if self._sampler is not None and not isinstance(self._sampler, Sized):
            raise TypeError(f"{type(self._sampler).__name__} has no length, so neither does its loader")
        return sum(self._builder.microbatches(number, item) for number, item in enumerate(self._draw()))

    def __iter__(self) -> Generator[PlannedBatch, None, None]:
        if self._passes and isinstance(self._sampler, Iterator):
            rule = "is an iterator, and an earlier pass has read ahead in it"
            raise ConfigError("sampler", type(self._sampler).__name__, rule, "pass one that can restart")
        masks = self._builder.masks if self._masks_given else arguments.masks_of(self.dataset, None)
        if masks is not self._builder.masks and masks_digest(masks) != self._facts["masks"]:
            rule = "have changed since the loader was made, and plans have the earlier ones"
            raise ConfigError("dataset.masks", "others", rule, "make another loader")
        start = self._place = self._begin
        if self._sampling is not None and torch.is_grad_enabled() and self._left == (start,) * 3:
            text = f"a fourth pass begins at iteration {start.iteration} of epoch {start.epoch}, after three left early"
            remedy = "keep one iterator, or call set_epoch"
            warn(f"{text}: it yields the same samples again; {remedy}", stacklevel=2)
        draw = self._draw()
        never_read = self._sampling is not None and not (self._sampling.shuffle or self._least)
        if never_read and self._group[1] > 1 and (dropped := draw.dropped):
            text = f"the last {dropped} iterations are dropped in every epoch, since groups run equally many"
            warn(f"{text}: shuffle, or to evaluate begin the pass under torch.no_grad()", stacklevel=2)
        self._left = (*self._left[-2:], start)
        self._meters.begin()
        self._check_place()
        if self._leads:
            wiring.watch.begin(self)
        iterations = Iterations(self._builder, draw, start.iteration)
        pieces = copy(self._source), iterations, self._rank, self._timeout_s, self._prepare
        with closing(fetching.Lookahead(*pieces)) as ahead, ExitStack() as stack:
            supply = self._supply(stack, ahead, iterations)
            encoded: Iterator[PlannedBatch] = iter(())
            if self._encoder is not None:
                self._media.draw, self._media.start = self._draw(), start.iteration
                encoded = stack.enter_context(closing(iter(self._encoder)))
            self._begin = Place(start.epoch)
            while (result := self._next(iterations, ahead.current, supply)) is not None:
                iteration, fetched = result
                for batch in self._batches(iteration, fetched, encoded, iteration.number == start.iteration):
                    if (batch.iteration, batch.microbatch) >= start[1:]:
                        place = iteration.number + batch.is_last, 0 if batch.is_last else batch.microbatch + 1
                        self._place = Place(start.epoch, *place)
                        yield batch
                        self._meters.end(batch.batch.tokens)
                iterations.forget(iteration.number + 1)
                ahead.reach(iteration.number + 1)
        self._left = ()
        self._communicator.all_gather([], "the end of a pass")
        totals(self._replicas, (self._place.epoch, -1, 0), 0, 0.0)

    def pairs(self) -> Generator[tuple[PlannedBatch, PlannedBatch], None, None]:
        """Iterates over a pass two microbatches at a time: halves for `ping_pong`, of `tokens_per_rank` each.

        A recipe's `pack: {wlb: {}}` balances their times. A state resumes after the last pair. Raises ConfigError if an
        iteration has, or the last one may have, an odd number of microbatches."""
        rule = "halves are two microbatches of an iteration, which must have an even number"
        if self.job.microbatches % 2:
            raise ConfigError("microbatches", self.job.microbatches, rule, "pass twice the number of pairs")
        if self._sampling is not None and not self._least:
            raise ConfigError(
                "drop_last", False, f"{rule}, also in the last iteration", "pass drop_last=True"
            )
        with closing(iter(self)) as batches:
            for ping in batches:
                if ping.microbatch % 2 or ping.is_last:
                    label, remedy = f"iteration {ping.iteration}", "start between pairs, at an even number"
                    raise ConfigError(label, f"a single half, microbatch {ping.microbatch}", rule, remedy)
                yield ping, next(batches)

    def iterations(self) -> Generator[tuple[PlannedBatch, ...], None, None]:
        """Yields all microbatches, or ticks, of one iteration at a time. A state resumes after the last iteration."""
        group: tuple[PlannedBatch, ...] = ()
        with closing(iter(self)) as batches:
            for batch in batches:
                group = (*group, batch)
                if batch.is_last:
                    yield group
                    group = ()

    def _draw(self) -> Draw:
        completes = not torch.is_grad_enabled()
        return Draw(self._sampling, self._sampler, self._begin.epoch, *self._group, self._least, completes)

    def _for_evaluation(self) -> PlannedLoader:
        """A copy that begins each pass at the first iteration of its epoch, and drops none."""
        other = copy(self)
        other.set_epoch(self._place.epoch, start=0)
        other._least = 0
        return other

    # ---- a pass

    def _supply(self, stack: ExitStack, ahead: fetching.Lookahead, iterations: Iterations) -> fetching.Supply:
        """The supply of a pass's plans, open until the stack is closed."""
        submits = self._rank == 0 if self._source.shared else not self._workers
        supply: fetching.Supply = ahead
        if self._workers:  # first: a sampler's generator is copied before the submitting thread draws from it
            pieces = self.dataset, self._source, self._builder, self._draw(), ahead.current, self._rank
            share = fetching.Share(*pieces, self._form, self._timeout_s)
            prefetcher = fetching.WorkerPrefetcher(share, self._workers, ahead, iterations)
            supply = stack.enter_context(closing(prefetcher))
        # without `submit` it draws ahead, so that the source gets the next keys too
        if submits or not self._workers:
            ahead.run(ahead.submit if submits else lambda iteration: None, self._lookahead)
        if not self._workers:
            ahead.run(ahead.fetch, fetching.DEPTH)
        return supply

    def _check_place(self) -> None:
        """Raises ExecutionError if ranks begin different passes, or groups of ranks draw from different orders of
        samples. A collective."""
        self._passes += 1
        epoch, start, microbatch = self._begin
        text = f"pass {self._passes} of epoch {epoch}, from iteration {start}, microbatch {microbatch}"
        text += f", with shifted={sorted(self._form.shifted)}"
        remedy = "Give all ranks the same options, and iterate over the loader equally often on each"
        error = difference_error(self._communicator, text, "passes", "ranks begin different passes", remedy)
        if error is None and self._replicas is not None and (order := self._sampling) is not None:
            error = self._orders_error(self._replicas, order)
        if error is not None:
            raise error

    def _orders_error(self, replicas: Transport, order: Sampling) -> ExecutionError | None:
        lengths = f"{len(self._builder.lengths)} samples, lengths {self._facts['lengths'][:8]}"
        text = f"{lengths}, seed {order.seed}, shuffle {order.shuffle}, {order.microbatches} of {order.tokens} tokens"
        message = "groups draw from different orders of samples"
        remedy = "Give all groups the same samples and seed: iterations of one order are dealt to them"
        return difference_error(replicas, text, "orders of groups", message, remedy, "group")

    def _next(
        self, iterations: Iterations, number: int, supply: fetching.Supply
    ) -> tuple[Iteration, fetching.Fetched] | None:
        """The next iteration and its plan, None after the last; an error on this rank ends all ranks and groups."""
        iteration: Iteration | Exception | None
        try:
            iteration = iterations.at(number)
        except Exception as error:
            iteration = error
        if iteration is None:
            return None
        begun_s = time.monotonic()

        def take() -> fetching.Fetched:
            if isinstance(iteration, Exception):
                raise iteration
            return supply.take(number)

        def plan() -> fetching.Fetched:
            from apportion.planner.iteration.jobs import plan_job

            assert isinstance(iteration, Iteration)
            return fetching.Fetched(plan_job(self.job, iteration.batches).slice_for(self._rank))

        try:
            fetched = self._agreement.take(number, take, plan)
        except Exception as error:
            if isinstance(error, TimeoutError):
                label = f"iteration {number}, rank {self._rank}"
                message = f"{label}: no plan within {self._timeout_s:g} s ({error})"
                remedy = "give it more time, or the service more workers or look-ahead"
                error = fetching.PlanTimeoutError(f"{message}; {remedy}")
            totals(self._replicas, (self._place.epoch, number, 0), 0, 0.0, error)  # raises it
        finally:
            self._meters.waited_s += time.monotonic() - begun_s
        assert isinstance(iteration, Iteration)
        return iteration, fetched

    def _prepare(self, piece: IterationSlice) -> fetching.Fetched:
        """Adds handles: loads programs on the device, in the fetching thread, ahead of the trainer."""
        handles = []
        for part in piece.slices:
            rows = int(part.layout(part.header.home_layout).rows_per_rank[0])
            padding = self._form.padded(rows) - rows
            handle = PlanHandle(part, self._communicator, self._engine, padding, self._form.envelope)
            handles.append(handle.prepare(self._device))
        return fetching.Fetched(piece, None, tuple(handles))

    def _batches(
        self, iteration: Iteration, fetched: fetching.Fetched, encoded: Iterator[PlannedBatch], begins: bool
    ) -> Iterator[PlannedBatch]:
        handles = fetched.handles or self._prepare(fetched.piece).handles or ()
        rows, valid, weight = self._agree_rows(iteration, handles, fetched, begins)
        parts = iteration.parts(fetched.piece.indexes)
        common: dict[str, Any] = {"iteration": iteration.number, "_replicas": self._replicas}
        common |= {"valid_tokens": valid, "total_weight": weight, "_shifted": self._form.shifted}
        common |= {"_staged": self._builder.table is not None}
        layers = self.job.model.layers
        common["_layers"] = layers if isinstance(layers, Mapping) else {}
        for index, (handle, row, (batch, samples)) in enumerate(zip(handles, rows, parts, strict=True)):
            yield PlannedBatch(
                **{name: value for name, value in row._asdict().items() if name != "shared"},
                **common,
                position_ids=pad(handle.position_ids, (0, handle.padding)),
                handle=handle,
                microbatch=index,
                is_last=index == len(handles) - 1,
                samples=samples[:0] if iteration.repeats else samples,
                batch=batch,
                **self._encoder_share(handle, batch, samples, encoded),
            )

    def _encoder_share(
        self, handle: PlanHandle, batch: Batch, samples: Ints, encoded: Iterator[PlannedBatch]
    ) -> dict[str, Any]:
        """The encoder's share of a microbatch, and the decoder's feed. Raises ExecutionError."""
        if self._encoder is None or not len(expected := self._media.of(samples)[0]):
            return {}
        if (media := next(encoded, None)) is None or not np.array_equal(media.samples, expected):
            received = None if media is None else media.samples.tolist()
            message = f"the encoder's next microbatch has media {received}, the decoder's {expected.tolist()}"
            raise ExecutionError(
                f"{message}: pass a sampler that draws the same samples in every iteration over it"
            )
        positions = self._media.places(batch, samples)
        return {"media": media, "feed": EncoderFeed(media.handle, handle, positions, self._media.media.merge)}

    def _agree_rows(
        self, iteration: Iteration, handles: Sequence[PlanHandle], fetched: fetching.Fetched, begins: bool
    ) -> tuple[tuple[Rows, ...], int, float]:
        """The rows, and the iteration's number of labels and their weight over all ranks and groups. A collective, also
        where it raises: this rank's error if it cannot read them, else ExecutionError if ranks hold different plans,
        another rank has no rows or different fields, samples or tokens, or groups are out of step."""
        rows, facts, error = tuple[Rows, ...](), NO_ROWS, None
        try:
            rows = fetched.rows or tuple(rows_of(self.dataset, iteration, fetched.piece, self._form, begins))
            facts = Facts.of(rows, iteration.samples)
        except Exception as unread:  # reported to the other ranks before it is raised
            error = unread
        try:
            gathered = agree(handles, facts.numbers(), partial(_describe_microbatches, iteration, handles))
            ranks = [Facts.read(numbers) for numbers in gathered]
            error = self._any_rank_error(iteration, rows, error, ranks)
        except ExecutionError as mismatch:
            ranks, error = [], mismatch
        valid = sum(rank_facts.label_count for rank_facts in ranks) // self._repeats
        weight = sum(rank_facts.weight for rank_facts in ranks) / self._repeats
        position = self._place.epoch, iteration.number, len(handles)
        sums = totals(self._replicas, position, valid, weight, error)
        self._meters.iterations += 1
        return rows, *sums

    def _any_rank_error(
        self, iteration: Iteration, rows: Sequence[Rows], error: Exception | None, ranks: Sequence[Facts]
    ) -> Exception | None:
        """The error of this or another rank, or None; a collective if there is an error."""
        failed = [rank for rank, facts in enumerate(ranks) if facts == NO_ROWS]
        label, transport = f"iteration {iteration.number}", self._communicator
        if failed:
            return failure_error(transport, failed, error, f"{label}: ranks {failed} have no rows")
        if len({facts.form for facts in ranks}) > 1:
            text = " and ".join(dict.fromkeys(row.form for row in rows))
            message = f"{label}: samples have different fields"
            remedy = "Give all samples equal fields, dtypes and widths"
            return difference_error(transport, text, "fields", message, remedy)
        if len({facts.drawn for facts in ranks}) > 1:
            message = f"{label}: ranks draw different samples"
            remedy = "Give all ranks the same seed, or samplers with the same order"
            return difference_error(transport, iteration.describe(), "samples", message, remedy)
        if (mismatch := differing_sample(ranks)) is not None:
            # plans depend only on lengths, so they may be equal
            message = f"ranks read different tokens, labels or fields of sample {mismatch[0]}: {by_value(mismatch[1])}"
            remedy = "Give all ranks the same dataset, and seed random changes by the number of the sample"
            return ExecutionError(f"{label}: {message}. {remedy}")
        return None


def _default_recipe(ticks: TickTable | None) -> str | Recipe:
    """The default recipe; for ticks, one that keeps a microbatch's layout the same in all ticks."""
    if ticks is None:
        return DEFAULT_RECIPE
    from apportion.planner.iteration.ticks import RECIPE

    return RECIPE


def _describe_microbatches(iteration: Iteration, handles: Sequence[PlanHandle]) -> str:
    """Describes an iteration's microbatches, samples and plans, for the error that ranks raise if these differ."""
    plans = ", ".join(handle.name for handle in handles)
    return f"{iteration.describe()} under plans {plans}"
