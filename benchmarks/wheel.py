"""Builds a wheel with the planner's loops compiled, for this Python, the numba that is installed, and this kind of CPU.

Run: python benchmarks/wheel.py [--out dist] [--recipes all] [--check]. The loops are compiled from the sources as the
wheel has them, for x86-64-v3 or arm64; the wheel is for one Python and one platform, and works with any numba, which
compiles what it must where it is another one. --check: installs it into a new environment, and starts there; exit code
1 where anything is compiled. It needs the package index. Import, plan and verification are timed (promised: 1 s).
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIRST = """
import time
begun = time.perf_counter()
import apportion as ap
imported = time.perf_counter()
batch = ap.Batch.from_lengths([5000, 900, 3000, 200, 1800, 700, 2400, 384])
ap.verify(ap.plan(batch, ap.Cluster(1, 8), ap.Model(8, 4, 64), recipe="fcp"))
done = time.perf_counter()
from apportion.ir.loops.jit import compiling
print(compiling.loops, imported - begun, done - begun)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Build a wheel with compiled loops.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--recipes", default="all")
    parser.add_argument("--check", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder), chosen.out, chosen.recipes)
        print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB")
        return check(Path(folder), wheel) if chosen.check else 0


def build(folder: Path, out: Path, recipes: str) -> Path:
    """The wheel, in `out`; folder: for a copy of the sources."""
    tree = folder / "tree"
    skipped = shutil.ignore_patterns("__pycache__", "_compiled")
    shutil.copytree(ROOT / "apportion", tree / "apportion", ignore=skipped)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    warmup = [
        sys.executable,
        "-m",
        "apportion",
        "warmup",
        "--recipes",
        recipes,
        "--into",
        "apportion/_compiled",
    ]
    subprocess.run(warmup, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, check=True)
    options = [f"--python-tag=cp{sys.version_info[0]}{sys.version_info[1]}", f"--plat-name={_platform()}"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(folder / "made"),
    ]
    options = [f"--config-settings=--build-option={option}" for option in options]
    subprocess.run([*command, *options, str(tree)], check=True)
    (made,) = (folder / "made").glob("*.whl")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(made, out))


def _platform() -> str:
    """The wheel's platform tag. Loops call nothing of the system by themselves: numba's own needs are the limit."""
    import sysconfig

    if sys.platform == "linux":
        return f"manylinux_2_27_{platform.machine()}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def check(folder: Path, wheel: Path) -> int:
    """Installs the wheel with this environment's numba, and starts it as on a new machine."""
    from numba import __version__ as numba

    home = folder / "environment"
    venv.create(home, with_pip=True)
    python = str(home / "bin/python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, f"{wheel}[numba]", f"numba=={numba}"], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"NUMBA_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    compiled = 0
    for _ in range(3):  # the first reads a cold disk, and writes byte code
        ran = subprocess.run(
            [python, "-c", FIRST], cwd=folder, env=environment, stdout=subprocess.PIPE, check=True
        )
        loops, imported, total = map(float, ran.stdout.split())
        print(
            f"{loops:.0f} loops compiled; import {imported:.2f} s; with plan and verification {total:.2f} s"
        )
        compiled += int(loops)
    return int(compiled > 0)


if __name__ == "__main__":
    sys.exit(main())
