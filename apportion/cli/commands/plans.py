"""Commands that make, check and show one plan: plan, verify, show, diff."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from apportion.cli import files, inputs, options
from apportion.cli.output import FAILED, OK, count, emit, status
from apportion.cli.request import BatchOptions, command
from apportion.ir.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from apportion.bench import BenchJob, Row
    from apportion.ir.bytes.codec import Plan


MAX_SEARCHED_RANKS = 256  # ranks up to which `plan` searches for a faster recipe
MIN_GAIN = 0.02  # smaller gains are within the error of a forecast

Output = Annotated[Path | None, Option("--output", "-o", help="Write the plan here.", metavar="P.plan")]


@command
def plan(
    request: BatchOptions,
    recipe: options.RecipeName = "auto",
    block: options.Block = None,
    pods: options.Pods = None,
    threads: options.Threads = 1,
    output: Output = None,
    server: Annotated[str | None, Option(help="Planning server to use.", metavar="URL")] = None,
    token_file: options.TokenFile = None,
    ca: options.Certificates = None,
    as_json: options.AsJson = False,
) -> None:
    """Plan one batch, verify the plan, and print its figures.

    The batch is a file, or is drawn from a list of lengths or a workload until
    the ranks are full. With --server a planning server makes the plan: an
    unreachable server is retried for 10 s, the plan may take 600 s, and
    planning_ms includes the time of the request.

    [bold]Examples[/bold]

      apportion plan --batch examples/batch.json --ranks 8 -o first.plan

      apportion plan --workload examples/code_lengths.json --ranks 64 --recipe fcp --block 2048 -o code.plan

      apportion plan --workload examples/code_lengths.json --ranks 64 --recipe auto

      apportion plan --lengths lengths.jsonl --cluster cluster.yaml --model model.yaml --json

      apportion plan --batch examples/batch.json --ranks 8 --server http://127.0.0.1:8321 -o first.plan
    """
    from apportion.bench import BenchJob, measure, warm_up
    from apportion.cli.printed import plans as printed
    from apportion.ir.bytes.transport import compress
    from apportion.ir.plan.summary import plan_rows

    files.check_output("--output", output)
    cluster, model, hardware = request.setting()
    request.check_files("--batch", "--lengths", "--workload")
    (batch,), skipped = request.batches(cluster.ranks * request.rank_tokens, None, 1)
    the_recipe = inputs.recipe_of(recipe, block, pods)
    job = BenchJob(batch, cluster, model, the_recipe, request.seed, hardware, threads)
    if server is not None:
        with status(f"planning on {server}"):
            row = _plan_by_server(server, inputs.token_of(token_file), ca, job)
    else:
        with status("planning"):
            warm_up(the_recipe)
            row = measure(job)
    if output is not None:
        files.write(output, compress(row.plan.encode()))
    record = row.record() | {
        "seed": request.seed,
        "id": row.plan.id.hex(),
        "skipped_samples": skipped,
        "file": None if output is None else str(output),
        **{key: row.plan.report[key] for key in ("departures", "search") if key in row.plan.report},
    }
    record["faster"] = None if inputs.is_search(the_recipe) else _faster_recipe(job, row.plan)
    title = f"plan {record['id'][:16]} of {the_recipe.name}, verified"
    rows = [("model", printed.model_line(request.model, model)), *plan_rows(record)]
    emit(record, as_json, lambda: printed.summary(title, rows + printed.faster_rows(record["faster"])))


def _faster_recipe(job: BenchJob, plan: Plan) -> dict[str, Any] | None:
    """The recipe that a search finds for this batch, and the simulated times of its plan and `plan`: forward plus
    backward, one call of each kind. None if it is not faster by `MIN_GAIN`, or above `MAX_SEARCHED_RANKS` ranks."""
    from apportion.bench import plan_unverified
    from apportion.ir.errors import ApportionError
    from apportion.planner.simulate import simulate

    if job.cluster.ranks > MAX_SEARCHED_RANKS:
        return None
    try:
        auto_plan = plan_unverified(replace(job, recipe="auto"))
        runs = [simulate(candidate, job.hardware) for candidate in (auto_plan, plan)]
    except ApportionError:  # no recipe that the search tries can serve the batch
        return None
    ms, own_ms = (run.forward_ms + run.backward_ms for run in runs)
    name = auto_plan.report["search"]["recipe"]["name"]
    return {"recipe": name, "ms": ms, "own_ms": own_ms} if ms < (1 - MIN_GAIN) * own_ms else None


def _plan_by_server(url: str, token: str | None, ca: Path | None, job: BenchJob) -> Row:
    """Plans a request on a server and verifies the answer here. Raises ConfigError, ServiceError, UnreachableError."""
    from time import perf_counter

    from apportion.bench import Row, Times, timed_verify
    from apportion.ir.bytes.codec import decode
    from apportion.ir.bytes.job import Job
    from apportion.ir.request.policy import Policy
    from apportion.planner.recipe.recipes import find_recipe
    from apportion.service.client import PLAN, Client

    policy = Policy(find_recipe(job.recipe), seed=job.seed)
    tokens_per_rank = -(-job.batch.tokens // job.cluster.ranks)
    request = Job(job.cluster, job.model, policy, tokens_per_rank, hardware=job.hardware)
    client, start = Client(url, token, ca=ca), perf_counter()
    try:
        received = decode(client.plan(request, [job.batch], PLAN))
    finally:
        client.close()
    times = Times(((perf_counter() - start) * 1e3,))
    return Row(received, times, Times((timed_verify(received, job.threads),)))


def verify(plan: options.PlanFile, threads: options.Threads = 1, as_json: options.AsJson = False) -> None:
    """Check a plan, using only its bytes, against every rule. Exit code 1 if it breaks one.

    [bold]Example[/bold]

      apportion verify first.plan
    """
    from apportion.ir.verify import check

    the_plan = files.read_plan(plan, check_id=False)  # the verifier reports a wrong id
    violations = check(the_plan, threads)
    names = ("rule", "rank", "kind", "phase", "instruction", "message", "excerpt")
    violation_records = [{name: getattr(item, name) for name in names} for item in violations]
    record = {"id": the_plan.id.hex(), "ok": not violations, "violations": violation_records}
    verdict = count(len(violations), "violation") if violations else "every rule holds"
    emit(
        record,
        as_json,
        lambda: f"{plan}: {verdict} (id {the_plan.id.hex()[:16]})",
        *(lambda item=item: str(item) for item in violations),
    )
    raise typer.Exit(FAILED if violations else OK)


def show(
    plan: options.PlanFile,
    rank: Annotated[int | None, Option(help="Print this rank's program.", min=0)] = None,
    svg: Annotated[
        Path | None, Option(help="Draw the mask and the simulated timelines into this file.", metavar="P.svg")
    ] = None,
    kind: Annotated[str | None, Option(help="With --svg: this attention kind. Default: the first.")] = None,
    phase: Annotated[str | None, Option(help="With --svg: forward (default) or backward.")] = None,
    hardware: options.HardwareName = None,
    as_json: options.AsJson = False,
) -> None:
    """Show a plan: its figures and a picture of the ranks, the program of one rank as text, or a drawing.

    The drawing has the mask, each part in the colour of the rank that computes it
    (above 64 ranks, of its node), and below it the simulated timelines.

    [bold]Examples[/bold]

      apportion show first.plan

      apportion show first.plan --rank 3

      apportion show first.plan --svg first.svg --phase backward
    """
    if svg is None:
        flags = {"--kind": kind, "--phase": phase, "--hardware": hardware}
        inputs.refuse(flags, "selects what is drawn, and nothing is drawn", "add --svg or drop")
    files.check_output("--svg", svg)
    the_plan = files.read_plan(plan)
    if rank is not None and rank >= the_plan.header.ranks:
        rule = f"the plan has ranks 0 to {the_plan.header.ranks - 1}"
        raise ConfigError("--rank", rank, rule, "name one of these")
    if svg is not None:
        from apportion.cli.pictures.draw import draw

        used = inputs.hardware_for(hardware, the_plan)
        files.write(svg, draw(the_plan, kind, phase or "forward", used).encode())
    if rank is None:
        _show_plan(the_plan, svg, as_json)
    else:
        _show_rank(the_plan, rank, as_json)


def _show_plan(plan: Plan, svg: Path | None, as_json: bool) -> None:
    from apportion.cli.printed import plans as printed
    from apportion.ir.plan import summary

    record = {
        "id": plan.id.hex(),
        "kinds": list(plan.header.kinds),
        "report": dict(plan.report),
        "programs": printed.program_sizes(plan),
        "load": summary.loads(plan).tolist(),
        "tokens": summary.tokens(plan).tolist(),
        "svg": None if svg is None else str(svg),
    }
    title = f"plan {record['id'][:16]}, recipe {plan.header.recipe}"
    views: list[Callable[[], RenderableType]] = [
        lambda: printed.summary(title, summary.plan_rows(plan.report)),
        lambda: printed.picture(plan),
        lambda: printed.programs_table(record["programs"]),
    ]
    if (search := plan.report.get("search")) is not None:
        views.append(lambda: printed.search_table(search))
    emit(record, as_json, *views)


def _show_rank(plan: Plan, rank: int, as_json: bool) -> None:
    from apportion.cli.printed import plans as printed

    text = plan.text(rank).rstrip("\n")
    programs = printed.program_sizes(plan, rank)
    emit({"id": plan.id.hex(), "rank": rank, "programs": programs, "text": text}, as_json, lambda: text)


def diff(
    left: Annotated[Path, Argument(help="A plan file.", metavar="A")],
    right: Annotated[Path, Argument(help="Another plan file.", metavar="B")],
    html: options.Html = None,
    hardware: options.HardwareName = None,
    as_json: options.AsJson = False,
) -> None:
    """Show how two plans differ. Exit code 1 if they do.

    [bold]Example[/bold]

      apportion diff monday.plan tuesday.plan

      apportion diff monday.plan tuesday.plan --html diff.html
    """
    from apportion.report.diff import diff as compare

    if html is None:
        rule = "applies to times on the HTML page, and none is written"
        inputs.refuse({"--hardware": hardware}, rule, "add --html or drop")
    files.check_output("--html", html)
    plans = [(str(path), files.read_plan(path)) for path in (left, right)]
    difference = compare(*(plan for _, plan in plans))
    if html is not None:
        from apportion.report import diff_html

        files.write(html, diff_html(difference, plans, inputs.hardware_of(hardware)).encode())
    emit(difference.to_data(), as_json, lambda: "\n".join(difference.lines()))
    raise typer.Exit(OK if difference.equal else FAILED)
