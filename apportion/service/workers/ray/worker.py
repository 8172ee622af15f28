"""What Ray's workers call; they find it by its name, so they need the same release of this package."""

from __future__ import annotations

from importlib import import_module

from apportion.ir.errors import ConfigError
from apportion.ir.version import __version__
from apportion.service.workers.tasks import encode
from apportion.service.workers.worker import answer, refusal


def work(release: str, runner: str, data: bytes) -> bytes:
    """The encoded reply to an encoded task. release: the server's, for another one may plan otherwise."""
    if release != __version__:
        rule = f"a worker of the cluster has {__version__}, the server has {release}"
        return encode(refusal(ConfigError("apportion", __version__, rule, "install one release everywhere")))
    return answer(data, import_module(runner).run)


def warm(runner: str) -> None:
    import_module(runner).warm()
