"""The documented format: golden plans stay readable, and schema, prose, example and code agree."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from apportion import Plan, Slice, masks
from apportion._core.tables import MAX_ROWS
from apportion.ir import verify
from apportion.ir.bytes import codec
from apportion.ir.bytes.wire import MAX_BYTES
from apportion.ir.isa import (
    LIMIT,
    MOVE_COLUMNS,
    OP_NAMES,
    OPERAND_COLUMNS,
    RECURRENCE_TABLES,
    SPAN_COLUMNS,
    TABLES,
    VERSION,
    Argument,
    Op,
    Use,
)
from apportion.ir.plan import wellformed as structure
from apportion.ir.tensors import PHASES, TENSOR_NAMES, Tensor
from apportion.report.diff import diff
from tests.support.formats import SCHEMAS, decoded
from tests.support.parse import parse
from tests.support.random_plans import random_plan

ROOT = Path(__file__).parents[2]
GOLDEN = sorted(path.stem for path in (SCHEMAS / "golden").glob("*.plan"))
FORMAT = (SCHEMAS / "FORMAT.md").read_text()


def golden(name: str) -> tuple[bytes, str]:
    return (SCHEMAS / f"golden/{name}.plan").read_bytes(), (SCHEMAS / f"golden/{name}.txt").read_text()


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_plans_equal_their_texts(name: str) -> None:
    data, text = golden(name)
    assert parse(text).encode() == data
    assert Plan.decode(data).text() == text
    assert parse(text).id == Plan.decode(data).id


def test_each_version_has_golden_plans_and_documentation() -> None:
    known = [(3, minor) for minor in range(VERSION[1] + 1)]
    assert sorted({Plan.decode(golden(name)[0]).header.version for name in GOLDEN}) == known
    assert FORMAT.startswith("# The plan format, version {}.{}\n".format(*VERSION))
    evolution = (SCHEMAS / "EVOLUTION.md").read_text()
    assert re.findall(r"^\| (\d\.\d+) \|", evolution, re.MULTILINE) == ["{}.{}".format(*v) for v in known]


def test_the_prose_states_the_diagonals_of_every_mask() -> None:
    table = FORMAT.split("| mask | diagonals |")[1].split("\n\n")[0]
    names = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(names) == sorted(masks.SPECS)


@pytest.mark.parametrize("name", ["tiny", "kinds"])
def test_the_golden_slice_proves_itself(name: str) -> None:
    data = (SCHEMAS / f"golden/{name}.rank1.slice").read_bytes()
    plan = Plan.decode(golden(name)[0])
    assert Slice.decode(data) == plan.for_rank(1)
    assert plan.for_rank(1).encode() == data


# ---------------------------------------------------------------------------------------------- the example


def read_plan(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(ROOT / "examples/read_plan.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_reader_written_from_the_prose_agrees(name: str) -> None:
    path = SCHEMAS / f"golden/{name}.plan"
    plan = Plan.decode(path.read_bytes())
    rank = plan.header.ranks - 1
    result = read_plan(str(path), str(rank))
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == f"id {plan.id.hex()} matches"
    steps = re.findall(r"^ +\d+ (\w+)", result.stdout, re.MULTILINE)
    ops = [op for program in plan.programs.values() for op in program.rank(rank)["instructions"]["op"]]
    assert steps == [OP_NAMES[Op(op)] for op in ops]
    shown = set(re.findall(r"[a-z]+=(\w+\.(?:home|work)\[\d+:\d+\))", result.stdout))
    ours = set(re.findall(r"(\w+\.(?:home|work)\[\d+:\d+\))", re.sub(" *operands.*", "", plan.text(rank))))
    assert shown == ours


def test_the_example_is_short_and_refuses_a_damaged_plan(tmp_path: Path) -> None:
    source = (ROOT / "examples/read_plan.py").read_text()
    assert len(source.splitlines()) <= 400
    imports = re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE)
    assert imports == ["json", "sys", "hashlib", "msgpack"]
    data = golden("tiny")[0]
    (tmp_path / "x.plan").write_bytes(data.replace(b"FEASIBLE", b"OPTIMAL!"))
    result = read_plan(str(tmp_path / "x.plan"))
    assert result.returncode != 0
    assert "is not that of the bytes" in result.stderr


# ---------------------------------------------------------------------------------------------- schema and prose


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft202012Validator:
    data = json.loads((SCHEMAS / "plan.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(data)
    return jsonschema.Draft202012Validator(data)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_plans_fit_the_schema(schema: jsonschema.Draft202012Validator, name: str) -> None:
    schema.validate(decoded(golden(name)[0]))


def test_any_plan_fits_the_schema(schema: jsonschema.Draft202012Validator) -> None:
    for seed in range(20):
        schema.validate(decoded(random_plan(seed).encode()))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("id",), "00"),
        (("version",), [2, 0]),
        (("header", "ranks"), 0),
        (("header", "dtype"), "int8"),
        (("header", "extra"), 1),
        (("header", "diagonals"), {"default": [[0, 2**62 + 1]]}),
        (("header", "diagonals"), {"default": [[0, n] for n in range(9)]}),
        (("parts",), []),
        (("parts", 0, "rank"), -1),
        (("parts", 0, "programs", "default", "sideways"), {}),
        (("parts", 0, "programs", "default", "forward", "tasks"), [[1]]),
        (("parts", 0, "programs", "default", "forward", "tasks", 0), [2**49]),
        (("parts", 0, "programs", "default", "forward", "novel"), []),
        (("layouts", "attention", "tokens"), -1),
        (("moves", 0), ["attention"]),
    ],
)
def test_the_schema_refuses(schema: jsonschema.Draft202012Validator, path: Any, value: object) -> None:
    plan = decoded(golden("tiny")[0])
    inner: Any = plan
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        schema.validate(plan)


def test_the_schema_lists_the_columns() -> None:
    data = json.loads((SCHEMAS / "plan.schema.json").read_text())["$defs"]
    tables = data["program"]["properties"]
    assert tables.keys() == TABLES.keys()
    recurrent = data["part"]["properties"]["recurrent"]["properties"]
    for name, names in {**TABLES, **RECURRENCE_TABLES}.items():
        table = {**tables, **recurrent}[name]
        assert table["description"].split(", ") == [*names]
        assert data[table["$ref"].split("/")[-1]]["minItems"] == len(names)


def test_the_prose_lists_every_code() -> None:
    for field in random_plan(0).header.__dataclass_fields__:
        assert f"`{field}`" in FORMAT
    for size in MAX_BYTES.values():
        assert f"{size >> 20} MiB" in FORMAT


def section(title: str) -> str:
    """The text of a section of the prose."""
    return FORMAT.split(f". {title}\n")[1].split("\n## ")[0]


def rows_of(title: str, head: str) -> list[list[str]]:
    """The cells of the table in a section whose first line begins with `head`."""
    lines = section(title).split(f"\n{head}")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


_PHASES = {PHASES: "both", ("forward",): "forward", ("backward",): "backward"}


def test_the_prose_states_the_contents_of_tensors() -> None:
    names = {"head_dim": "D", "v_head_dim": "Dv", "hidden": "E"}
    sides = {"query": "query", "key": "KV", None: "none"}
    for tensor, row in zip(list(Tensor)[1:], rows_of("Memory", "| code |"), strict=True):
        c = tensor.contents
        parts = ", ".join(p.name + (f" [{names[p.width]}]" if p.width else "") for p in c.parts)
        dtype = "sum" if c.wide else "model"
        assert row == [str(int(tensor)), c.name, sides[c.side], parts, dtype, _PHASES[c.phases]]


_VERBS = [
    "reads",
    "takes",
    "moves",
    "writes",
    "writes once",
    "adds to",
    "clears",
    "finishes",
    "sends or receives",
]
_USES = dict(zip(Use, _VERBS, strict=True))


def operand_text(argument: Argument) -> str:
    names = " or ".join(TENSOR_NAMES[tensor] for tensor in argument.tensors)
    tensors = "any tensor" if len(argument.tensors) == len(Tensor) - 1 else names
    place = " at home" if argument.at_home else ""
    like = f" like `{argument.like}`" if argument.like else ""
    absent = " (may be none)" if argument.optional else ""
    return f"`{argument.column}` {_USES[argument.use]} {tensors}{place}{like}{absent}"


def test_the_prose_states_how_ops_use_their_operands() -> None:
    for op, row in zip(Op, rows_of("Instructions", "| op | name |"), strict=True):
        operands = ", ".join(map(operand_text, op.rule.arguments)) or "-"
        assert row == [str(int(op)), OP_NAMES[op], op.rule.list or "-", _PHASES[op.rule.phases], operands]


def test_the_prose_states_which_sums_first_overwrites() -> None:
    sums = [(op, a) for op in Op for a in op.rule.arguments if a.use is Use.ADD]
    flags = [[f"`{OP_NAMES[op]}`", f"`{a.column}`", str(a.flag)] for op, a in sums]
    assert rows_of("Instructions", "| op | target |") == flags


def test_the_prose_states_the_range_of_every_column() -> None:
    tables = {"layouts": SPAN_COLUMNS, "moves": MOVE_COLUMNS, **TABLES, **RECURRENCE_TABLES}
    rows = rows_of("The tables", "| table |")
    assert [(table.strip("`"), column.strip("`")) for table, column, *_ in rows] == [
        (table, column) for table, columns in tables.items() for column in columns
    ]
    special = {"operand": "operand", "peer": "0 to ranks - 1", "operands.heads": "0 to head sets"}
    special |= {"kind": "recurrent kind"}
    for table, column, values, _ in ([cell.strip("`") for cell in row] for row in rows):
        name = "spans" if table == "layouts" else table
        kind = "operand" if column in OPERAND_COLUMNS.get(table, ()) else column
        low, high = structure._RANGES.get((name, column), (0, LIMIT))
        known = special.get(f"{table}.{column}") or special.get(kind)
        free = "" if (low, high) == (0, LIMIT) else f"{low} to {high}".replace(str(LIMIT), "2^48")
        assert values == (known or free), (table, column)


def test_the_prose_lists_every_rule_of_the_verifier() -> None:
    rows = rows_of("The rules of a valid plan", "| rule |")
    assert [name.strip("`") for name, _ in rows] == [rule.name for rule in verify.RULES]


def test_the_prose_lists_the_checks_of_readers() -> None:
    rows = rows_of("What a reader refuses", "| check |")
    suite = json.loads((SCHEMAS / "conformance/suite.json").read_text())
    assert [name.strip("`") for name, _ in rows] == list(dict.fromkeys(e["breaks"] for e in _by_check(suite)))
    assert f"more than 2^{MAX_ROWS.bit_length() - 1} rows" in FORMAT


def _by_check(suite: dict[str, Any]) -> list[dict[str, Any]]:
    order = ["envelope", "version", "id", "sections", "parts", "tables", "values", "indexes", "counts"]
    return sorted(suite["malformed"], key=lambda entry: order.index(entry["breaks"]))


def test_the_prose_lists_the_masks_with_their_own_positions() -> None:
    names = {name.strip("`") for name, _ in rows_of("Layouts, moves and positions", "| mask |")}
    assert names - {"every other"} == {name for name, spec in masks.SPECS.items() if spec.structured}


def test_sections_named_in_the_prose_exist() -> None:
    numbers = [int(number) for number in re.findall(r"^## (\d+)\. ", FORMAT, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    names = re.findall(r"[Ss]ections? (\d+)(?: (?:to|and) (\d+))?(?: and (\d+))?", FORMAT)
    assert {int(number) for numbers in names for number in numbers if number} <= set(numbers)


# ---------------------------------------------------------------------------------------------- diff


def test_equal_plans_do_not_differ() -> None:
    for name in GOLDEN:
        data, text = golden(name)
        found = diff(Plan.decode(data), parse(text))
        assert found.equal
        assert (found.values, found.layouts, found.programs, found.moves) == ((), (), (), False)
        assert found.lines() == [f"the plans are equal: {Plan.decode(data).id.hex()}"]


def changed(old: str, new: str) -> Plan:
    text = re.sub("^id .*\n", "", golden("tiny")[1], flags=re.MULTILINE)
    assert old in text
    return parse(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ('"slots": 2', '"slots": 3', "report.slots: 2 | 3"),
        ('"seed": 0, "v_head', '"seed": 1, "v_head', "header.seed: 0 | 1"),
        ('"memory_gib": 80.0', '"memory_gib": 90.0', "request.cluster.memory_gib: 80.0 | 90.0"),
        ("length=4 sequence=0 position=0", "length=3 sequence=0 position=0", "layout linear differs"),
        ("send 1 row=4 rows=1", "send 1 row=3 rows=1", "moves differ"),
        ("  clear O.home[0:3)\n", "", "  clear 1 | 0"),
        ("  clear O.home[0:3)\n", "", "  - clear O.home[0:3)"),
        ("[-4,0] first", "[-4,1] first", "  + attend Q.work[0:3) KV.home[0:5) -> O.work[0:3) [-4,1] first"),
        ("arenas Q 3x2, O 3x2", "arenas Q 3x2, O 4x2", "  operands or arenas differ, the instructions agree"),
    ],
)
def test_differing_fields_are_named(old: str, new: str, line: str) -> None:
    found = diff(changed("rank 0", "rank 0"), changed(old, new))
    assert line in found.lines()
    data = json.loads(json.dumps(found.to_data()))
    assert not data["equal"]
    assert data["ids"][0] != data["ids"][1]


def test_plans_of_different_sizes_differ() -> None:
    tiny, other = Plan.decode(golden("tiny")[0]), codec.seal(random_plan(3, ranks=5))
    lines = diff(tiny, other).lines(programs=2)
    assert "header.ranks: 2 | 5" in lines
    assert lines[-1].endswith("more programs differ")
    assert diff(other, tiny).lines()
    assert other.text()
