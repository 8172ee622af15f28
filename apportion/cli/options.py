"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

SAMPLED = 32768  # tokens for each rank, if the batch is drawn

PlanFile = Annotated[Path, Argument(help="A plan file, written by `apportion plan -o`.", metavar="PLAN")]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object on stdout and nothing else.")]
Html = Annotated[Path | None, Option(help="Write an HTML page that opens offline.", metavar="P.html")]
BatchFile = Annotated[Path | None, Option(help="Batch file (JSON, YAML), used unchanged.", metavar="B.json")]
LengthsFile = Annotated[
    Path | None,
    Option(
        help="Lengths to draw documents from: integers or JSON, one per line; a JSON list; CSV; Parquet; the folder of "
        "a saved Hugging Face dataset.",
        metavar="L.jsonl",
    ),
]
Column = Annotated[
    str | None,
    Option(
        help="Column of --lengths: integers, or lists whose entries are counted. Default: length, else input_ids."
    ),
]
Overlong = Annotated[
    str | None,
    Option(
        help="What to do with documents longer than a microbatch of all ranks: drop, cut or refuse. Default: drop; "
        "precompute: refuse.",
        metavar="RULE",
        show_default=False,
    ),
]
WorkloadFile = Annotated[Path | None, Option(help="Workload file: samples of a data set.", metavar="W.json")]
MaskText = Annotated[
    str | None,
    Option(
        help="Mask of plain documents: a name, or YAML as in a batch file; {kind: mask} for a model with several "
        "kinds. Default: causal, or the masks of --model's config.json.",
        metavar="MASK",
    ),
]
ClusterFile = Annotated[Path | None, Option(help="Cluster file (YAML or JSON).", metavar="C.yaml")]
ModelFile = Annotated[
    Path | None, Option(help="Model file (YAML or JSON), or a Hugging Face config.json.", metavar="M.yaml")
]
HardwareName = Annotated[
    str | None,
    Option(
        help="Kernel times and links: a built-in name (h100, h200, a100, a800, h20, b200; each also as "
        "NAME-stage, with the kernels of engine stage) or a file from `apportion profile`.",
        metavar="NAME|H.json",
    ),
]
Ranks = Annotated[int | None, Option(help="Number of ranks. Default: 64.", min=1)]
RanksPerNode = Annotated[
    int | None, Option(help="Ranks per node. Default: the largest divisor of --ranks up to 8.", min=1)
]
TokensPerRank = Annotated[
    int | None, Option(help=f"Tokens sampled for each rank. Default: {SAMPLED}.", min=1)
]
Virtual = Annotated[int, Option(help="Chunks of layers per stage (interleaved 1F1B).", min=1)]
Microbatches = Annotated[int, Option(help="Microbatches per optimizer step.", min=1)]
RecipeName = Annotated[
    str, Option(help="A recipe from `apportion recipes`, or a recipe file (YAML or JSON); `auto` searches.")
]
RecipeNames = Annotated[
    str, Option(help="Names of recipes and recipe files, separated by commas, or all.", metavar="NAME,...")
]
Block = Annotated[
    str | None,
    Option(help="Tokens per block, or `auto`, for recipes that cut blocks. Default: the recipe's."),
]
Pods = Annotated[
    str | None,
    Option(
        help="Plan parts of at most this many ranks each, or `auto` (1024): every document stays "
        "in one part. For thousands of ranks."
    ),
]
Threads = Annotated[
    int, Option(help="Threads for parallel steps; the result does not change.", min=1, max=1024)
]
Seed = Annotated[int, Option(help="Seed of sampling and planning.", min=0)]
Workers = Annotated[
    int, Option(help="Worker processes. Default: one per core.", min=0, max=1024, show_default=False)
]
Ray = Annotated[
    str | None, Option(help="Plan on a Ray cluster: its address, or `local`.", metavar="ADDRESS|local")
]
TokenFile = Annotated[
    Path | None,
    Option(help="File with the server's token. Default: APPORTION_TOKEN in the environment.", metavar="FILE"),
]
Certificates = Annotated[
    Path | None, Option(help="PEM file of certificates to trust. Default: the system's.", metavar="FILE")
]
