"""The command line. Every command has `--json`: one JSON object on stdout, everything else on stderr.

    exit 0  done, and every check passed
    exit 1  a check failed: a plan breaks a rule, two plans differ, losses differ
    exit 2  the input is wrong: an option, a file, a request that cannot be served, a part not installed

Heavy imports (numpy, torch) happen inside the commands, so that `--help` is instant.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from apportion.ir.errors import ApportionError, ConfigError, MissingDependencyError, VerifyError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from apportion.ir.batch import Batch
    from apportion.ir.cluster import Cluster
    from apportion.ir.model import Model
    from apportion.ir.plan import Plan
    from apportion.ir.policy import Recipe

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
SAMPLED = 32768  # tokens for each rank, where the batch is drawn
WIDTH = 108  # the widest table; narrower terminals wrap its lines rather than lose figures

app = typer.Typer(
    help="Plans context-parallel attention: which rank holds which tokens, computes which piece of "
    "attention, and moves which bytes.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)
bench = typer.Typer(help="Measure planning.", no_args_is_help=True)
app.add_typer(bench, name="bench")

# click's UsageError, wherever the installed typer keeps its click
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

PlanFile = Annotated[
    Path, typer.Argument(help="A plan file, as `apportion plan -o` writes it.", metavar="PLAN")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
ModelFile = Annotated[
    Path | None, typer.Option("--model", help="Model file (YAML or JSON).", metavar="M.yaml")
]
RecipeName = Annotated[
    str, typer.Option("--recipe", help="A recipe by name, or a recipe file (YAML or JSON).")
]
Block = Annotated[
    str | None, typer.Option("--block", help="Tokens per block, or `auto`. Default: what the recipe says.")
]
WorkloadFile = Annotated[
    Path | None, typer.Option("--workload", help="Workload file: samples of a data set.", metavar="W.json")
]


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. The console script `apportion`."""
    args = sys.argv[1:] if args is None else list(args)
    try:
        code = int(app(args=args, prog_name="apportion", standalone_mode=False) or OK)
        print(end="", flush=True)
        return code
    except UsageError as error:
        return _refuse(error.format_message(), error, "--json" in args)  # type: ignore[attr-defined]
    except VerifyError as error:
        return _refuse(str(error), error, "--json" in args, FAILED)
    except ApportionError as error:
        return _refuse(str(error), error, "--json" in args)
    except BrokenPipeError:  # the reader of a pipe has seen enough, as in `apportion show P.plan | head`
        _drop_stdout()
        return OK
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        message = reason if error.filename is None else f"{error.filename}: {reason}"
        return _refuse(message, error, "--json" in args)
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED


def _refuse(message: str, error: Exception, as_json: bool, code: int = BAD_INPUT) -> int:
    """Say what is wrong, in one paragraph on stderr or as JSON on stdout."""
    if as_json:
        facts = {
            name: str(getattr(error, name))
            for name in ("field", "value", "rule", "remedy")
            if hasattr(error, name)
        }
        said = json.dumps({"error": {"type": type(error).__name__, "message": message} | facts}) + "\n"
    else:
        said = ""
        print(f"apportion: {message}", file=sys.stderr)
    try:
        print(said, end="", flush=True)
    except OSError:  # nobody reads it; the exit code still tells
        _drop_stdout()
    return code


def _drop_stdout() -> None:
    """Send what stdout still holds nowhere: flushing it when Python exits would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _emit(record: Mapping[str, Any], as_json: bool, *views: Callable[[], RenderableType]) -> None:
    """The result: `record` as one line of JSON, or the views of it for people."""
    if as_json:
        print(json.dumps(record, allow_nan=False))
        return
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    for view in views:
        shown = view()
        if isinstance(shown, str):
            print(shown)  # rich would take brackets for markup and wrap lines
        else:
            console.print(shown)


def _note(message: str) -> None:
    print(message, file=sys.stderr)


def _need(package: str, extra: str, purpose: str) -> None:
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise MissingDependencyError(package, extra, purpose)


# --- plan


@app.command("plan")
def plan_command(
    batch: Annotated[
        Path | None, typer.Option("--batch", help="Batch file (JSON or YAML), taken whole.", metavar="B.json")
    ] = None,
    lengths: Annotated[
        Path | None, typer.Option("--lengths", help="One length a line; sampled.", metavar="L.jsonl")
    ] = None,
    workload: WorkloadFile = None,
    cluster: Annotated[
        Path | None, typer.Option("--cluster", help="Cluster file (YAML or JSON).", metavar="C.yaml")
    ] = None,
    model: ModelFile = None,
    ranks: Annotated[int | None, typer.Option("--ranks", help="Ranks. Default: 64.", min=1)] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option("--ranks-per-node", help="Default: 8, or the largest divisor below.", min=1)
    ] = None,
    tokens_per_rank: Annotated[
        int | None,
        typer.Option("--tokens-per-rank", help=f"Tokens sampled for each rank. Default: {SAMPLED}.", min=1),
    ] = None,
    recipe: RecipeName = "fcp",
    block: Block = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of sampling and planning.", min=0)] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan here.", metavar="P.plan")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan one batch, verify the plan, and say what it costs.

    The batch is a file, or is drawn from a list of lengths or a workload until the ranks are full.

    [bold]Examples[/bold]

      apportion plan --batch examples/batch.json --ranks 8 -o first.plan

      apportion plan --workload examples/code_lengths.json --ranks 64 --block 2048 -o code.plan

      apportion plan --lengths lengths.jsonl --cluster cluster.yaml --model model.yaml --json
    """
    from apportion import views
    from apportion.bench import Job, measure, warm_up

    if output is not None:
        _check_output(output)
    the_cluster = _cluster(cluster, ranks, ranks_per_node)
    if batch is not None and tokens_per_rank is not None:
        rule = "a batch file is planned whole, only --lengths and --workload are sampled"
        raise ConfigError("--tokens-per-rank", tokens_per_rank, rule, "drop it or --batch")
    tokens = the_cluster.ranks * (SAMPLED if tokens_per_rank is None else tokens_per_rank)
    the_batch, skipped = _batch(batch, lengths, workload, tokens, seed)
    job = Job(the_batch, the_cluster, _model(model), _recipe(recipe, block), seed)
    with Console(stderr=True).status("compiling (the first run of all, half a minute) and planning"):
        warm_up(job.recipe)
        row = measure(job)
    if output is not None:
        _write(output, row.plan.encode())
    record = row.record() | {
        "seed": seed,
        "id": row.plan.id.hex(),
        "skipped_samples": skipped,
        "file": None if output is None else str(output),
    }
    _emit(
        record, as_json, lambda: views.summary(f"plan {record['id'][:16]}, verified", views.plan_rows(record))
    )


def _check_output(path: Path) -> None:
    """Refuse before planning what could not be written after it."""
    wrong = _unwritable(path.resolve())
    if wrong is not None:
        raise ConfigError("--output", str(path), *wrong)


def _unwritable(path: Path) -> tuple[str, str] | None:
    """Why the file cannot be written and what to do about it, None where it can."""
    folder = path.parent
    if path.is_dir():
        return "it is a folder", "name a file in it"
    if not folder.is_dir():
        return f"there is no folder {folder}", "make it first"
    if not os.access(path if _is_device(path) else folder, os.W_OK):
        return f"{folder} cannot be written", "choose another folder"
    return None


def _is_device(path: Path) -> bool:
    return path.exists() and not path.is_file()  # as /dev/null, which must not be replaced by a file


def _write(path: Path, data: bytes) -> None:
    """Write the whole file or none: under another name beside it, then renamed."""
    path = path.resolve()  # a link stays a link
    if _is_device(path):
        path.write_bytes(data)
        return
    part = path.with_name(f".apportion-{os.getpid()}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _cluster(file: Path | None, ranks: int | None, per_node: int | None) -> Cluster:
    from apportion.bench import cluster_of
    from apportion.ir.cluster import Cluster

    if file is None:
        return cluster_of(*_divided(64 if ranks is None else ranks, per_node))
    for option, value in (("--ranks", ranks), ("--ranks-per-node", per_node)):
        if value is not None:
            raise ConfigError(
                option, value, "the cluster file says this already", f"drop {option} or --cluster"
            )
    return Cluster.load(file)


def _divided(ranks: int, per_node: int | None) -> tuple[int, int | None]:
    if per_node is not None and ranks % per_node:
        raise ConfigError("--ranks-per-node", per_node, f"must divide --ranks {ranks}", "write a divisor")
    return ranks, per_node


def _model(file: Path | None) -> Model:
    from apportion.ir.model import Model

    return Model() if file is None else Model.load(file)


def _batch(
    batch: Path | None, lengths: Path | None, workload: Path | None, tokens: int, seed: int
) -> tuple[Batch, int]:
    """The batch, and how many samples were larger than `tokens` and so skipped."""
    from apportion.ir.batch import Batch
    from apportion.ir.workload import read_lengths, read_workload, sample

    given = [path for path in (batch, lengths, workload) if path is not None]
    if len(given) != 1:
        rule = "exactly one of --batch, --lengths and --workload must be there"
        raise ConfigError("--batch", [str(path) for path in given], rule, "name one file")
    if batch is not None:
        return Batch.load(batch), 0
    drawn, skipped = sample((read_lengths if lengths else read_workload)(given[0]), tokens, tokens, seed)
    if skipped:
        _note(f"warning: skipped {_count(skipped, 'sample')} of more tokens than all ranks hold ({tokens:,})")
    return drawn, skipped


def _recipe(name: str, block: str | None) -> Recipe:
    """The recipe of that name or file, with its block size replaced where `--block` is given."""
    from apportion.ir.policy import Recipe
    from apportion.planner import recipes

    is_file = Path(name).suffix in (".yaml", ".yml", ".json")
    recipe = Recipe.load(name) if is_file else recipes.find_recipe(name)
    return recipe if block is None else recipes.with_block(recipe, _block(block))


def _block(text: str) -> int | str:
    if text == "auto":
        return text
    if not (text.isascii() and text.isdigit() and 0 < len(text.lstrip("0")) < 10):
        raise ConfigError(
            "--block",
            text,
            "must be one positive whole number, or auto",
            "write --block 2048 or --block auto",
        )
    return int(text)


def _integers(option: str, text: str, low: int, high: int) -> list[int]:
    """The integers in [low, high] of a comma-separated list."""
    from apportion.ir.fields import integer

    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            option, text, "must be whole numbers, separated by commas", f"write {option} 8,64"
        ) from None
    return [integer(option, number, low, high) for number in numbers]


# --- verify, show, diff


def _read_plan(path: Path, check_id: bool = True) -> Plan:
    from apportion.ir.codec import decode
    from apportion.ir.errors import DecodeError

    try:
        return decode(path.read_bytes(), check_id)
    except DecodeError as error:
        raise type(error)(f"{path} is not a plan that this release reads: {error}") from error


@app.command()
def verify(plan: PlanFile, as_json: AsJson = False) -> None:
    """Check a plan against every rule, from its bytes alone. Exit code 1 if it breaks one.

    [bold]Example[/bold]

      apportion verify first.plan
    """
    from apportion.ir.verify import check

    the_plan = _read_plan(plan, check_id=False)  # a wrong id is for the verifier to tell
    violations = check(the_plan)
    record = {
        "id": the_plan.id.hex(),
        "ok": not violations,
        "violations": [_violation(item) for item in violations],
    }
    verdict = _count(len(violations), "violation") if violations else "every rule holds"
    _emit(
        record,
        as_json,
        lambda: f"{plan}: {verdict} (id {the_plan.id.hex()[:16]})",
        *(lambda item=item: str(item) for item in violations),
    )
    raise typer.Exit(FAILED if violations else OK)


def _violation(item: Any) -> dict[str, Any]:
    names = ("rule", "rank", "kind", "phase", "instruction", "message", "excerpt")
    return {name: getattr(item, name) for name in names}


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


@app.command()
def show(
    plan: PlanFile,
    rank: Annotated[int | None, typer.Option("--rank", help="Print this rank's program.", min=0)] = None,
    as_json: AsJson = False,
) -> None:
    """Show a plan: its figures and a picture of the ranks, or the program of one rank as text.

    [bold]Examples[/bold]

      apportion show first.plan

      apportion show first.plan --rank 3
    """
    the_plan = _read_plan(plan)
    if rank is None:
        _show_plan(the_plan, as_json)
    else:
        _show_rank(the_plan, rank, as_json)


def _show_plan(plan: Plan, as_json: bool) -> None:
    from apportion import views

    record = {
        "id": plan.id.hex(),
        "kinds": list(plan.header.kinds),
        "report": dict(plan.report),
        "programs": views.program_sizes(plan),
        "load": views.loads(plan).tolist(),
        "tokens": views.tokens(plan).tolist(),
    }
    title = f"plan {record['id'][:16]}, recipe {plan.header.recipe}"
    _emit(
        record,
        as_json,
        lambda: views.summary(title, views.plan_rows(plan.report)),
        lambda: views.picture(plan),
        lambda: views.programs_table(record["programs"]),
    )


def _show_rank(plan: Plan, rank: int, as_json: bool) -> None:
    from apportion import views

    if rank >= plan.header.ranks:
        raise ConfigError(
            "--rank", rank, f"the plan has ranks 0 to {plan.header.ranks - 1}", "name one of these"
        )
    text = plan.text(rank).rstrip("\n")
    if as_json:
        _emit(
            {"id": plan.id.hex(), "rank": rank, "programs": views.program_sizes(plan, rank), "text": text},
            True,
        )
    else:
        print(text)


@app.command()
def diff(
    left: Annotated[Path, typer.Argument(help="A plan file.", metavar="A")],
    right: Annotated[Path, typer.Argument(help="Another plan file.", metavar="B")],
    as_json: AsJson = False,
) -> None:
    """Say how two plans differ. Exit code 1 if they do.

    [bold]Example[/bold]

      apportion diff monday.plan tuesday.plan
    """
    from apportion.ir.diff import diff as compare

    found = compare(_read_plan(left), _read_plan(right))
    _emit(found.to_data(), as_json, lambda: "\n".join(found.lines()))
    raise typer.Exit(OK if found.equal else FAILED)


# --- demo, selftest, version


@app.command()
def demo(
    workload: WorkloadFile = None,
    steps: Annotated[int, typer.Option("--steps", help="Optimizer steps.", min=1)] = 20,
    as_json: AsJson = False,
) -> None:
    """Train a small transformer on 4 CPU processes under plans, and the same one in one process without.

    Document lengths come from the examples, or from --workload. Prints both losses, and what the plans cost
    beside contiguous filling and a zig-zag ring. Exit code 1 if the losses differ or a check fails.

    [bold]Examples[/bold]

      apportion demo

      apportion demo --workload examples/doc_lengths.json --steps 5 --json
    """
    _need("torch", "torch", "the demo")
    from apportion.trainer import demo as trainer

    raise typer.Exit(trainer.run(workload, steps, as_json))


@app.command()
def selftest(as_json: AsJson = False) -> None:
    """Hold planned attention against plain attention on the ranks and the backend of this job.

    Under torchrun every rank takes part and rank 0 prints errors and milliseconds; without it, one rank is tested.
    Exit code 1 if an error is too large.

    [bold]Examples[/bold]

      torchrun --nproc-per-node 8 -m apportion selftest

      apportion selftest --json
    """
    _need("torch", "torch", "the selftest")
    from apportion.trainer import selftest as trainer

    raise typer.Exit(trainer.run(as_json))


@app.command()
def version(as_json: AsJson = False) -> None:
    """Print the versions of Apportion, its plan format, and what it runs on.

    [bold]Example[/bold]

      apportion version --json
    """
    record = _versions()
    _emit(record, as_json, lambda: "\n".join(f"{name:<10}{value or '-'}" for name, value in record.items()))


def _versions() -> dict[str, str | None]:
    import platform

    from apportion.ir import isa

    return {
        "apportion": _installed("apportion"),
        "format": f"{isa.FORMAT} {isa.VERSION[0]}.{isa.VERSION[1]}",
        "python": platform.python_version(),
        **{package: _installed(package) for package in ("numpy", "msgspec", "numba", "torch")},
    }


def _installed(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# --- bench


@bench.command("plan")
def bench_plan(
    recipe: RecipeName = "fcp",
    ranks: Annotated[
        str, typer.Option("--ranks", help="Rank counts, separated by commas.")
    ] = "8,64,256,1024",
    tokens_per_rank: Annotated[
        int, typer.Option("--tokens-per-rank", help="Tokens sampled for each rank.", min=1)
    ] = SAMPLED,
    block: Block = None,
    workload: WorkloadFile = None,
    model: ModelFile = None,
    repeats: Annotated[int, typer.Option("--repeats", help="Timed runs of each row.", min=5)] = 5,
    seeds: Annotated[str, typer.Option("--seeds", help="A row for each of these seeds.")] = "0",
    as_json: AsJson = False,
) -> None:
    """Time planning on one core: from the parsed batch to the encoded bytes of all ranks and both phases.

    Without --workload the documents are log-normal (median 2048, sigma 1.5, at most 512K tokens), causal.
    A warm-up run comes first; verification is timed by itself. Times are milliseconds.

    [bold]Examples[/bold]

      apportion bench plan --ranks 8,64 --block 2048

      apportion bench plan --recipe fcp --ranks 8,64,256,1024 --block auto --seeds 0,1,2 --json
    """
    _one_core()
    from apportion import views
    from apportion.bench import Grid, Source
    from apportion.ir.fields import MAX_INT
    from apportion.ir.isa import MAX_RANKS
    from apportion.ir.workload import read_workload

    source = Source(None if workload is None else read_workload(workload))
    counts = _integers("--ranks", ranks, 1, MAX_RANKS)
    grid = Grid(counts, _integers("--seeds", seeds, 0, MAX_INT), tokens_per_rank, repeats)
    rows = []
    for row in grid.rows(source, _model(model), _recipe(recipe, block)):
        _note(f"{row['ranks']} ranks, seed {row['seed']}: {row['planning_ms']['p50']:.1f} ms")
        rows.append(row)
    name = "log-normal documents" if workload is None else str(workload)
    record = {"benchmark": "plan", "workload": name, "versions": _versions(), "rows": rows}
    _emit(record, as_json, lambda: views.bench_table(rows))


def _one_core() -> None:
    """Keep numerical libraries that are not loaded yet to one thread."""
    for library in ("OMP", "OPENBLAS", "MKL", "NUMBA"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
