"""Compares `auto` with every single recipe and with the attainable efficiency, in a wide range of situations.

Run: python -m benchmarks.situations [--only TEXT,...] [--singles all|none|NAME,...] [--seconds 60] [--scenario NAME]
[--json]. Times cover forward and backward of all layers on the built-in h100: the README's model, 64 ranks, 8 per node,
32K tokens per rank, unless the situation's name says otherwise. Plans of `auto` are verified. A single recipe counts if
it keeps the token cap; if it takes longer than `--seconds` to plan and simulate, its row has only the reason. Rows of
the nominal scenario are stored in benchmarks/results/situations.json, where `--only` and named singles replace only the
rows that they measure; docs/benchmarks.md has the table.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from apportion.bench import Source, warm_up
from apportion.cli.environment import versions
from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import ApportionError
from apportion.ir.latent import Latent
from apportion.ir.masks import specs as masks
from apportion.ir.masks.spec import Mask
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.ir.request.sequences import Sequence
from apportion.ir.request.workload import lognormal_lengths, read_workload, sample
from apportion.ir.verify import verify
from apportion.planner import api
from apportion.planner.recipe.recipes import entries, find_recipe
from apportion.planner.simulate import Simulation, simulate
from apportion.planner.simulate.scenarios import SCENARIOS, Scenario, apply
from benchmarks.tables import ROOT, line, write_tables

RESULTS = ROOT / "benchmarks/results/situations.json"
HARDWARE = Hardware.load("h100")
RANKS, TOKENS = 64, 32768
MODEL = Model(q_heads=32, kv_heads=8, head_dim=128, layers=32)
#: recipes that cannot be compared with the rest: they take hidden states instead of q, k and v
PROJECTING = ("upipe", "upipe_ring")


@dataclass(frozen=True)
class Situation:
    """A situation. name: what is special about it; batch: draws the batch for a seed."""

    name: str
    batch: Callable[[int], Batch]
    cluster: Cluster
    model: Model = MODEL
    hardware: Hardware = HARDWARE

    def with_scenario(self, scenario: Scenario) -> Situation:
        """The situation, to be planned and simulated with a scenario's figures."""
        hardware, cluster = apply(scenario, self.hardware, self.cluster)
        return replace(self, hardware=hardware, cluster=cluster)


def cluster(ranks: int = RANKS, node: int = 8, **more: Any) -> Cluster:
    return Cluster(nodes=ranks // node, ranks_per_node=node, **({"nics_per_node": node} | more))


def documents(
    ranks: int = RANKS, tokens: int = TOKENS, mask: Mask | Mapping[str, Mask] | None = None, **shape: Any
) -> Callable[[int], Batch]:
    """Log-normal documents."""
    mask_spec = masks.causal() if mask is None else mask
    return lambda seed: Batch.from_lengths(lognormal_lengths(seed, ranks * tokens, **shape), mask=mask_spec)


def fixed(*lengths: int) -> Callable[[int], Batch]:
    return lambda seed: Batch.from_lengths(list(lengths))


def read(name: str, ranks: int = RANKS) -> Callable[[int], Batch]:
    """Samples from a file in examples/."""
    path = ROOT / "examples" / name
    if name.startswith("rollouts/"):
        return lambda seed: sample(read_workload(path), ranks * TOKENS, ranks * TOKENS, seed)[0]
    return lambda seed: Source(read_workload(path)).batch(ranks * TOKENS, seed)[0]


def chats(prompt: int, answers: int, median: int) -> Callable[[int], Batch]:
    """Groups of `answers` answers to one prompt; the answers' lengths are log-normal with the given median."""

    def draw(seed: int) -> Batch:
        lengths = lognormal_lengths(seed, RANKS * TOKENS, median=median, sigma=0.7)
        sizes = [lengths[first : first + answers] for first in range(0, len(lengths) - answers, answers)]
        masks_ = [masks.shared_question(prompt, [int(size) for size in group]) for group in sizes]
        sequences = [
            Sequence(prompt + int(sum(group)), mask) for group, mask in zip(sizes, masks_, strict=True)
        ]
        return Batch.from_sequences(sequences)

    return draw


def mla(heads: int = 128) -> Model:
    """DeepSeek-V3's attention, which sends latent rows."""
    return Model(q_heads=heads, kv_heads=1, head_dim=192, v_head_dim=128, latent=Latent(rank=512, rope=64))


def situations() -> Iterator[Situation]:
    default, window = cluster(), masks.sliding_window
    half, slow = (0.6,) * 32, tuple(0.8 if rank == 5 else 1.0 for rank in range(RANKS))
    yield Situation("log-normal", documents(), default)
    yield Situation("source files", read("code_lengths.json"), default)
    yield Situation("documents", read("doc_lengths.json"), default)
    yield Situation("one of 2M", fixed(RANKS * TOKENS), default)
    yield Situation("one of 1M, 8 ranks", fixed(1 << 20), cluster(8))
    yield Situation("two of 1M", fixed(1 << 20, 1 << 20), default)
    yield Situation("seven of 292K", fixed(*[292_000] * 7), default)
    yield Situation("median 300", documents(median=300, sigma=1.0), default)
    yield Situation("8K tokens a rank", documents(tokens=8192), default)
    yield Situation("4K tokens a rank", documents(tokens=4096), default)
    yield Situation("2K tokens a rank, short samples", documents(tokens=2048, median=400, sigma=0.6), default)
    yield Situation("window 4K", documents(mask=window(4096)), default)
    yield Situation("window 1K", documents(mask=window(1024)), default)
    yield Situation("sink 64, window 4K", documents(mask=masks.sink_window(64, 4096)), default)
    yield Situation("causal blockwise", documents(mask=masks.causal_blockwise(256, 2, 1)), cluster(32))
    yield Situation("chunked 8K", documents(mask=masks.chunked(8192)), default)
    yield Situation("full", documents(mask=masks.full()), default)
    yield Situation("GRPO, R1", read("rollouts/grpo_r1_g8.json"), default)
    yield Situation("GRPO, math", read("rollouts/rollout_math_g8.json"), default)
    yield Situation("GRPO, gsm8k", read("rollouts/rollout_gsm8k_g4.json"), default)
    yield Situation("chat, 16 answers", chats(30, 16, 250), default)
    gemma = documents(mask={"global": masks.causal(), "local": window(1024)})
    layers = {"global": 8, "local": 40}
    yield Situation("8 global, 40 local", gemma, default, Model(32, 16, 128, layers=layers))
    oss = documents(mask={"global": masks.causal(), "local": window(128)})
    layers = {"global": 18, "local": 18}
    yield Situation("18 global, 18 local", oss, default, Model(64, 8, 64, layers=layers))
    yield Situation("a rank at 0.8", documents(), cluster(speeds=slow))
    yield Situation("half at 0.6", documents(), cluster(speeds=(1.0,) * 32 + half))
    yield Situation("4 KV heads", documents(), default, Model(32, 4, 128))
    yield Situation("1 KV head", documents(), default, Model(32, 1, 128))
    yield Situation("32 KV heads", documents(), default, Model(32, 32, 128))
    yield Situation("MLA", documents(), default, mla())
    yield Situation("MLA, 8K tokens a rank", documents(tokens=8192), default, mla())
    yield Situation("MLA, 4K tokens a rank", documents(tokens=4096), default, mla())
    yield Situation("16 ranks a node", documents(), cluster(node=16))
    yield Situation("72 ranks in a node", documents(72), cluster(72, 72, intra_gbs=900.0))
    yield Situation("4 ranks a node", documents(), cluster(node=4))
    yield Situation("TP 4, 2 ranks a node", documents(), cluster(node=2), Model(8, 2, 128))
    yield Situation("24 ranks", documents(24), cluster(24))
    yield Situation("60 ranks, 6 a node", documents(60), cluster(60, 6))
    yield Situation("16 ranks", documents(16), cluster(16))
    yield Situation("8 ranks", documents(8), cluster(8))
    yield Situation("A100s, causal blockwise", documents(32, mask=masks.causal_blockwise(256, 2, 1)), a100s())


def a100s() -> Cluster:
    return cluster(32, intra_gbs=300.0, nics_per_node=4, inter_gbs=25.0)


# --- one situation


def figures(plan: Plan, simulation: Simulation) -> dict[str, float]:
    """Efficiency over all layers, attainable efficiency, and their ratio."""
    layers = plan.request.model.layers_of
    sums = [
        (layers(kind) * lost.ideal, layers(kind) * lost.attainable, layers(kind) * sum(lost))
        for (kind, _), lost in simulation.losses.items()
    ]
    ideal, attainable, time_ = (sum(column) for column in zip(*sums, strict=True))
    return {"efficiency": ideal / time_, "attainable": ideal / attainable, "share": attainable / time_}


def attempt(situation: Situation, batch: Batch, recipe: str, seconds: float) -> dict[str, Any]:
    """Figures of one recipe, or the reason that there are none; runs a child process with a time limit."""
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(sender, situation, batch, recipe))
    child.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            return {"reason": f"more than {seconds:g} s"}
        result: dict[str, Any] = json.loads(receiver.recv_bytes())
        return result
    except EOFError:
        return {"reason": "killed, probably for memory"}
    finally:
        child.kill()
        child.join()


def _send(sender: Connection, situation: Situation, batch: Batch, recipe: str) -> None:
    sender.send_bytes(json.dumps(_attempt(situation, batch, recipe)).encode())


def _attempt(situation: Situation, batch: Batch, recipe: str) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        plan = api.plan(
            batch,
            situation.cluster,
            situation.model,
            recipe=recipe,
            verify=False,
            hardware=situation.hardware,
        )
        seconds = time.perf_counter() - start
        simulation = simulate(plan, situation.hardware)
    except ApportionError as error:
        return {"reason": str(error)[:200]}
    except MemoryError:
        return {"reason": "out of memory"}
    record: dict[str, Any] = figures(plan, simulation) | {
        "tokens": plan.report["imbalance"]["tokens"],
        "pairs": plan.report["imbalance"]["compute"],
        "time": simulation.time_imbalance,
        "planning_ms": round(1e3 * seconds, 1),
    }
    if recipe == "auto":
        verify(plan)
        search = plan.report["search"]
        record |= {"recipe": search["recipe"], "steps": search["steps"]}
        record |= {"largest_part": plan.report["plan_bytes"]["largest_rank"], "lost_ms": simulation.lost_ms}
    return record


def row(situation: Situation, singles: list[str], seconds: float, seed: int = 0) -> dict[str, Any]:
    batch = situation.batch(seed)
    auto = attempt(situation, batch, "auto", max(seconds, 600.0))
    single = {name: attempt(situation, batch, name, seconds) for name in singles}
    return {
        "situation": situation.name,
        "seed": seed,
        "auto": auto,
        "single": single,
        "best": best_of(single),
    }


def best_of(single: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The fastest recipe that keeps the token cap."""
    efficiencies = {
        name: record["efficiency"]
        for name, record in single.items()
        if "reason" not in record and record["tokens"] <= 0.0201
    }
    return max(efficiencies, key=lambda name: efficiencies[name]) if efficiencies else None


# --- the table


def table(rows: list[dict[str, Any]]) -> str:
    """One line per situation; bold if `auto` is below 0.99 of the best single recipe or 0.85 of the attainable."""
    heads = ("situation", "attainable", "`auto`", "share", "its recipe", "best single", "ratio")
    lines = [line(heads), line(["---", *["--:"] * 3, "---", "---", "--:"])]
    for record in rows:
        auto, best = record["auto"], record["best"]
        if "reason" in auto:
            lines.append(line([record["situation"], "-", "-", "-", auto["reason"][:60], best or "-", "-"]))
            continue
        single = record["single"][best]["efficiency"] if best else None
        ratio = auto["efficiency"] / single if single else None
        lines.append(
            line(
                [
                    record["situation"],
                    f"{auto['attainable']:.3f}",
                    f"{auto['efficiency']:.3f}",
                    _bold_below(auto["share"], 0.85),
                    auto["recipe"]["name"],
                    "-" if best is None else f"`{best}` {single:.3f}",
                    "-" if ratio is None else _bold_below(ratio, 0.99),
                ]
            )
        )
    return "\n".join(lines)


def _bold_below(value: float, floor: float) -> str:
    return f"{value:.3f}" if value >= floor else f"**{value:.3f}**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="substrings of names, separated by commas")
    parser.add_argument("--singles", default="all", help="recipes to compare with: all, none, or names")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of a single recipe")
    parser.add_argument("--json", action="store_true", help="print all rows")
    known_scenarios = {scenario.name: scenario for scenario in SCENARIOS}
    parser.add_argument(
        "--scenario", default="nominal", choices=known_scenarios, help="only rows of `nominal` are stored"
    )
    options = parser.parse_args()
    recipes = [name for name in entries() if name != "auto" and name not in PROJECTING]
    singles = (
        recipes
        if options.singles == "all"
        else []
        if options.singles == "none"
        else options.singles.split(",")
    )
    is_nominal = options.scenario == "nominal"
    saved_rows = json.loads(RESULTS.read_text())["rows"] if is_nominal and RESULTS.exists() else []
    rows = {saved["situation"]: saved for saved in saved_rows}
    names = [text for text in options.only.split(",") if text]
    warm_up(find_recipe("auto"))
    every_situation = [case.with_scenario(known_scenarios[options.scenario]) for case in situations()]
    for situation in every_situation:
        if names and not any(text in situation.name for text in names):
            continue
        record = row(situation, singles, options.seconds)
        old = rows.get(situation.name)
        if old:  # keeps the measurements of recipes that did not run
            record["single"] = {**old["single"], **record["single"]}
            record["best"] = best_of(record["single"])
        rows[situation.name] = record
        print(table([record]).splitlines()[-1], file=sys.stderr, flush=True)
        order = [rows[case.name] for case in every_situation if case.name in rows]
        if is_nominal:
            RESULTS.write_text(json.dumps({"versions": versions(), "rows": order}, indent=1) + "\n")
    order = [rows[case.name] for case in every_situation if case.name in rows]
    if options.json:
        print(json.dumps(order, indent=1))
    elif not is_nominal:
        print(table(order))
    else:
        write_tables({"situations": table(order)})


if __name__ == "__main__":
    main()
