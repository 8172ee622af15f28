"""What the options of a request mean: cluster, model, hardware, batch, recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from apportion.cli.output import count, note
from apportion.ir.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from apportion.bench import Source
    from apportion.ir.bytes.codec import Plan
    from apportion.ir.request.batch import Batch
    from apportion.ir.request.cluster import Cluster
    from apportion.ir.request.hardware import Hardware
    from apportion.ir.request.model import Model
    from apportion.ir.request.policy import Recipe
    from apportion.ir.request.sampling import MaskSpec
    from apportion.ir.request.workload import Workload


def refuse(given: Mapping[str, Any], rule: str, remedy: str) -> None:
    """Raise ConfigError for the first option that is given (not None), where it may not stand."""
    for option, value in given.items():
        if value is not None:
            raise ConfigError(option, str(value), rule, f"{remedy} {option}")


def need(package: str, extra: str, purpose: str) -> None:
    """Raise MissingDependencyError where a package is not installed."""
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise MissingDependencyError(package, extra, purpose)


def hardware_of(name: str | None) -> Hardware | None:
    """The hardware of that name or file, None where none is named."""
    if name is None:
        return None
    from apportion.ir.request.hardware import Hardware

    return Hardware.load(name)


def cluster_of(
    file: Path | None, ranks: int | None, per_node: int | None, hardware: Hardware | None = None
) -> Cluster:
    """The cluster of the file, or of so many ranks with the links of the hardware (None: the default links).

    Where both are given, the file counts, and what the hardware says otherwise is a warning.
    """
    from apportion import bench
    from apportion.ir.request.cluster import Cluster

    if file is None:
        ranks = 64 if ranks is None else ranks
        if per_node is not None and ranks % per_node:
            raise ConfigError("--ranks-per-node", per_node, f"must divide --ranks {ranks}", "write a divisor")
        return bench.cluster_of(ranks, per_node, hardware)
    said = {"--ranks": ranks, "--ranks-per-node": per_node}
    refuse(said, "the cluster file says this already", "drop --cluster or")
    cluster = Cluster.load(file)
    warn_of_mismatch(hardware, cluster)
    return cluster


def hardware_for(name: str | None, plan: Plan) -> Hardware | None:
    """As `hardware_of`; where it was measured on other links or kernels than the plan's, stderr says so."""
    found, request = hardware_of(name), plan.request
    warn_of_mismatch(found, request.cluster)
    warn_of_dtype(found, request.model)
    return found


def warn_of_mismatch(hardware: Hardware | None, cluster: Cluster) -> None:
    """Say on stderr where the hardware was measured on other links than the cluster has."""
    for difference in [] if hardware is None else hardware.mismatch(cluster):
        note(f"warning: {difference}")


def warn_of_dtype(hardware: Hardware | None, model: Model) -> None:
    """Say on stderr where numbers of the model have another width than kernels (None: the built-in H100's) have."""
    from apportion.ir.request.hardware import Hardware
    from apportion.ir.request.model import ELEMENT_BYTES

    used = hardware or Hardware.load("h100")
    if ELEMENT_BYTES[used.dtype] != model.element_bytes:
        told = f"model.dtype is {model.dtype} where hardware {used.name} has {used.dtype}"
        note(f"warning: {told}: times are of {used.dtype} kernels, bytes of {model.dtype} numbers")


def setting_of(
    cluster: Path | None, ranks: int | None, per_node: int | None, model: Path | None, hardware: str | None
) -> tuple[Cluster, Model, Hardware | None]:
    """What is planned for, as `cluster_of`, `model_of` and `hardware_of`; what does not fit together, stderr says."""
    found, shape = hardware_of(hardware), model_of(model)
    warn_of_dtype(found, shape)
    return cluster_of(cluster, ranks, per_node, found), shape, found


def model_of(file: Path | None) -> Model:
    from apportion.ir.request.model import Model

    return Model() if file is None else Model.load(file)


def config_of(file: Path | None) -> Mapping[str, Any] | None:
    """The data of a Hugging Face `config.json`, None where the model file is none. Raises ConfigError."""
    from apportion.ir import fields
    from apportion.ir.request.hf_fields import is_config

    data = None if file is None else fields.load(file)
    return data if is_config(data) else None


def token_of(file: Path | None) -> str | None:
    """The token of a file, else that of the environment, if there is one."""
    import os

    from apportion.ir.fields import read_text

    return os.environ.get("APPORTION_TOKEN") if file is None else read_text(file).strip()


def masks_of(text: str | None) -> MaskSpec | None:
    """The mask of a name, or of YAML as batch files have it, or {kind: mask} of YAML; None where nothing is given.
    Raises ConfigError."""
    import yaml

    from apportion.ir.masks import specs as masks

    if text is None:
        return None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError:
        remedy = "write a name or '{sliding_window: {window: 1024}}'"
        raise ConfigError("--mask", text, "is not YAML", remedy) from None
    if isinstance(data, Mapping) and data and all(map(masks.is_data, data.values())):
        return {kind: masks.from_data(held, f"--mask.{kind}") for kind, held in data.items()}
    return masks.from_data({data: {}} if isinstance(data, str) else data, "--mask")


class Files(NamedTuple):
    """Where sequences come from: --batch, --lengths and --workload, at most one of them. model: the model file, whose
    masks plain documents have where no mask is given and it is a Hugging Face config."""

    batch: Path | None
    lengths: Path | None
    workload: Path | None
    model: Path | None = None

    @property
    def given(self) -> list[str]:
        """Those that are there."""
        return [str(path) for path in self[:3] if path is not None]

    @property
    def name(self) -> str:
        """Where the samples are from, in words."""
        return (self.given or ["log-normal documents"])[0]

    def not_one(self, options: str, how: str = "exactly") -> ConfigError:
        """Where there are several, or none."""
        rule = f"{how} one of {options} may be there"
        return ConfigError("input", self.given or "nothing", rule, "name one file")


def batches_of(
    files: Files,
    mask: str | None,
    tokens_per_rank: int | None,
    tokens: int,
    batches: int | None,
    usual: int,
    seed: int,
    longest: int | None = None,
) -> tuple[list[Batch], int]:
    """The batch of a file alone, or as many as asked for (else `usual`), of `tokens` tokens, each drawn with its own
    seed; and how many samples were too large. longest: most tokens of a sample, None: those of the batch. Raises
    ConfigError."""
    from apportion.ir.request.batch import Batch

    if len(files.given) > 1:
        raise files.not_one("--batch, --lengths and --workload", "at most")
    if files.batch is not None:
        given = {"--mask": mask, "--tokens-per-rank": tokens_per_rank, "--batches": batches}
        refuse(given, f"the batch {files.batch} is taken as it is, nothing is drawn", "drop --batch or")
        return [Batch.load(files.batch)], 0
    source = source_of(files, mask, longest)
    seeds = range(seed, seed + (batches or usual))
    drawn, skips = zip(*(source.batch(tokens, one) for one in seeds), strict=True)
    warn_of_skipped(sum(skips), longest or tokens)
    return list(drawn), sum(skips)


def source_of(files: Files, mask: str | None = None, longest: int | None = None) -> Source:
    """What batches are drawn from. Raises ConfigError."""
    from apportion.bench import Source
    from apportion.ir.request import hf_config

    samples, given, config = samples_of(files), masks_of(mask), config_of(files.model)
    plain = samples is None or not any(samples.masks)
    if given is None and config is not None and plain:
        given = hf_config.masks_of(config)
    return Source(samples, given, longest)


def samples_of(files: Files) -> Workload | None:
    """Samples to draw from, None where there is no file of them."""
    from apportion.ir.request.workload import read_lengths, read_workload

    if files.workload is not None:
        return read_workload(files.workload)
    return None if files.lengths is None else read_lengths(files.lengths)


def warn_of_skipped(skipped: int, tokens: int) -> None:
    """Say on stderr that samples were too large."""
    if skipped:
        note(
            f"warning: skipped {count(skipped, 'sample')} of more tokens than all ranks hold at a time ({tokens:,})"
        )


def recipes_of(text: str, option: str = "--recipes") -> list[Recipe]:
    """The recipes of a comma-separated list of names and files, each once, or `all` that there are."""
    from apportion.planner.recipe.recipes import entries

    names = list(entries()) if text == "all" else [name.strip() for name in text.split(",")]
    chosen = list(dict.fromkeys(recipe_of(name) for name in names))
    held = [recipe.name for recipe in chosen]
    for twice in (name for name in held if held.count(name) > 1):
        raise ConfigError(option, twice, "two of the recipes have this name", "rename one in its file")
    return chosen


def recipe_of(name: str, block: str | None = None, pods: str | None = None) -> Recipe:
    """The recipe of that name or file, with another block size where `block` is given, and with pods."""
    from apportion.ir import fields
    from apportion.planner.recipe import recipes

    is_file = Path(name).suffix in (".yaml", ".yml", ".json")
    recipe = recipes.find_recipe(fields.load(name) if is_file else name)
    if block is not None:
        recipe = recipes.with_block(recipe, _number_or_auto("--block", block, 2048))
    return recipe if pods is None else recipes.with_pods(recipe, _number_or_auto("--pods", pods, 1024))


def _number_or_auto(option: str, text: str, usual: int) -> int | str:
    if text == "auto":
        return text
    if not (text.isascii() and text.isdigit() and 0 < len(text.lstrip("0")) < 10):
        remedy = f"write {option} {usual} or {option} auto"
        raise ConfigError(option, text, "must be one positive whole number, or auto", remedy)
    return int(text)


def integers(option: str, text: str, low: int, high: int) -> list[int]:
    """The integers in [low, high] of a comma-separated list."""
    from apportion.ir.fields import integer

    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        rule = "must be whole numbers, separated by commas"
        raise ConfigError(option, text, rule, f"write {option} 8,64") from None
    return [integer(option, number, low, high) for number in numbers]
