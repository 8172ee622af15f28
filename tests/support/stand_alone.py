"""The reader that was written only from FORMAT.md: slow, and independent of the package's reader."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

_SPEC = spec_from_file_location("read_plan", Path(__file__).parents[2] / "examples/read_plan.py")
assert _SPEC is not None
assert _SPEC.loader is not None
read_plan: Any = module_from_spec(_SPEC)
_SPEC.loader.exec_module(read_plan)
