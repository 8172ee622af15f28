"""The options of a request, which several commands share: documents, cluster, model, hardware."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from apportion.cli import inputs, options
from apportion.cli.output import count, note
from apportion.ir.errors import ConfigError

if TYPE_CHECKING:
    from apportion.bench import Source
    from apportion.ir.request.batch import Batch
    from apportion.ir.request.cluster import Cluster
    from apportion.ir.request.hardware import Hardware
    from apportion.ir.request.model import Model
    from apportion.ir.request.workload import Workload


@dataclass(frozen=True)
class RequestOptions:
    """The documents to plan, and the setting. Fields are options of commands that take a request, see `command`."""

    lengths: options.LengthsFile = None
    column: options.Column = None
    workload: options.WorkloadFile = None
    overlong: options.Overlong = None
    mask: options.MaskText = None
    cluster: options.ClusterFile = None
    ranks: options.Ranks = None
    ranks_per_node: options.RanksPerNode = None
    tokens_per_rank: options.TokensPerRank = None
    model: options.ModelFile = None
    hardware: options.HardwareName = None
    seed: options.Seed = 0

    @property
    def files(self) -> dict[str, Path]:
        """Option -> file, for all given options that name a file of documents."""
        paths = {
            "--batch": getattr(self, "batch", None),
            "--lengths": self.lengths,
            "--workload": self.workload,
        }
        return {option: path for option, path in paths.items() if path is not None}

    @property
    def name(self) -> str:
        """Origin of the documents, in words."""
        return next(map(str, self.files.values()), "log-normal documents")

    @property
    def rank_tokens(self) -> int:
        return self.tokens_per_rank or options.SAMPLED

    def check_files(self, *allowed: str, least: int = 1) -> None:
        """Raises ConfigError unless exactly one file of documents is given; with `least` 0, none is allowed too."""
        if not least <= len(self.files) <= 1:
            rule = f"must come from {'exactly' if least else 'at most'} one of {', '.join(allowed)}"
            raise ConfigError("documents", " ".join(self.files) or "none", rule, "give one of these options")

    def setting(self) -> tuple[Cluster, Model, Hardware | None]:
        """Cluster, model and hardware; warns on stderr if they do not fit together. A cluster file excludes --ranks
        and --ranks-per-node. Raises ConfigError."""
        from apportion import bench
        from apportion.ir.request.cluster import Cluster

        hardware, model = inputs.hardware_of(self.hardware), inputs.model_of(self.model)
        inputs.warn_of_dtype(hardware, model)
        ranks, per_node = self.ranks, self.ranks_per_node
        if self.cluster is not None:
            flags = {"--ranks": ranks, "--ranks-per-node": per_node}
            inputs.refuse(flags, "conflicts with --cluster", "drop --cluster or")
            cluster = Cluster.load(self.cluster)
            inputs.warn_of_mismatch(hardware, cluster)
            return cluster, model, hardware
        ranks = 64 if ranks is None else ranks
        if per_node is not None and ranks % per_node:
            raise ConfigError("--ranks-per-node", per_node, f"must divide --ranks {ranks}", "write a divisor")
        return bench.cluster_of(ranks, per_node, hardware), model, hardware

    def samples(self) -> Workload | None:
        """Samples to draw from; None if there is no file of samples. Raises ConfigError."""
        from apportion.ir.request.workload import read_lengths, read_workload

        if self.lengths is None:
            inputs.refuse({"--column": self.column}, "applies to a file of lengths", "add --lengths or drop")
        if self.workload is not None:
            return read_workload(self.workload)
        return None if self.lengths is None else read_lengths(self.lengths, self.column)

    def source(self, longest: int | None = None) -> Source:
        """Source of the batches; plain documents have the mask of --mask, or of a config.json. longest: maximum
        tokens of a sample. Raises ConfigError."""
        from apportion.bench import Source
        from apportion.ir.request import hf_config

        samples, mask, config = self.samples(), inputs.masks_of(self.mask), inputs.config_of(self.model)
        if mask is None and config is not None and (samples is None or not any(samples.masks)):
            mask = hf_config.masks_of(config)
        return Source(samples, mask, longest, self.overlong or "drop")

    def draw(self, tokens: int, seed: int, longest: int | None = None) -> tuple[Batch, int]:
        """A batch, and the number of samples that were too large for it, with a warning on stderr."""
        batch, skipped = self.source(longest).batch(tokens, seed)
        warn_of_skipped(skipped, longest or tokens)
        return batch, skipped


@dataclass(frozen=True)
class BatchOptions(RequestOptions):
    """A request whose documents may be a batch file, used unchanged."""

    batch: options.BatchFile = None

    def batches(
        self, tokens: int, batches: int | None, default: int, longest: int | None = None
    ) -> tuple[list[Batch], int]:
        """The batch of a file, or `batches` batches (None: `default`) of `tokens` tokens, each drawn with its own
        seed; and the number of samples that were too large. longest: maximum tokens of a sample, None: `tokens`.
        Raises ConfigError."""
        from apportion.ir.request.batch import Batch

        self.check_files("--batch", "--lengths", "--workload", least=0)
        if self.batch is not None:
            flags = {"--mask": self.mask, "--tokens-per-rank": self.tokens_per_rank, "--batches": batches}
            flags |= {"--overlong": self.overlong, "--column": self.column}
            inputs.refuse(
                flags, f"the batch {self.batch} is used unchanged: nothing is drawn", "drop --batch or"
            )
            return [Batch.load(self.batch)], 0
        source, seeds = self.source(longest), range(self.seed, self.seed + (batches or default))
        draws, skips = zip(*(source.batch(tokens, seed) for seed in seeds), strict=True)
        warn_of_skipped(sum(skips), longest or tokens)
        return list(draws), sum(skips)


def warn_of_skipped(skipped: int, tokens: int) -> None:
    """Warn on stderr if samples were too large."""
    if skipped:
        cause = f"with more than {tokens:,} tokens (--overlong drop)"
        note(f"warning: skipped {count(skipped, 'sample')} {cause}")


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command from a function whose first argument is a request: the request's options come before its own."""
    hints = get_type_hints(function, include_extras=True)
    first, *rest = signature(function).parameters.values()
    kind: type[RequestOptions] = hints[first.name]
    option_hints = get_type_hints(kind, include_extras=True)
    option_params = [*signature(kind).parameters.values()]

    def run(**arguments: Any) -> None:
        function(kind(**{param.name: arguments.pop(param.name) for param in option_params}), **arguments)

    types: Mapping[str, Any] = {**option_hints, **hints}
    parameters = [
        Parameter(param.name, Parameter.KEYWORD_ONLY, default=param.default, annotation=types[param.name])
        for param in (*option_params, *rest)
    ]
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {param.name: param.annotation for param in parameters}
    run.__doc__, run.__name__ = function.__doc__, function.__name__
    return run
