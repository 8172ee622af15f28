"""Commands that end with the process that starts them, whatever they are doing."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from apportion.service import tied

CHILD = "import time; print('begun', flush=True); time.sleep(300); print('lived on', flush=True)"
PARENT = (
    "import subprocess, sys\n"
    "from apportion.service.tied import tied\n"
    "subprocess.run(tied(int(sys.argv[1]), '-c', sys.argv[2]))\n"
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_never_looks_ends_with_its_parent(number: int) -> None:
    command = [sys.executable, "-c", PARENT, str(int(number)), CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"begun\n"
        parent.kill()
        assert parent.stdout.read() == b""  # at its end once the child, too, is gone


def test_a_command_whose_parent_is_gone_already_does_not_begin() -> None:
    command = tied.tied(signal.SIGKILL, "-c", "print('begun')")
    command[command.index(tied.__file__) + 1] = "0"
    ended = subprocess.run(command, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, b"")
