"""What a client is told, checked; what is secret is not in the errors."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

from apportion.ir.errors import ConfigError
from apportion.ir.fields import integer, number
from apportion.service.client.link import Peer, trust
from apportion.service.private import key_of_server

_KEY = re.compile(r"[\x21-\x7e]+")


def peer(server: str, ca: str | Path | None, proxy: str | None, cert: str | Path | None = None) -> Peer:
    """How to get to a server; see `Client`."""
    return Peer(server, trust(server, ca, cert), _checked(proxy))


def split(field: str, url: str) -> tuple[str, str]:
    """Scheme, host and port; path."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ConfigError(field, "...", "is not a url", "write http(s)://HOST:PORT") from None
    shown = f"{parts.scheme}://{host}"
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(
            field, shown, "must be a url of http or https with a host", "write http://HOST:PORT"
        )
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(field, shown, "has a user, a query or a fragment", "leave them out, and pass key=")
    host = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{host}{'' if port is None else f':{port}'}", parts.path.rstrip("/")


def nearby(base: str, admin_key: str | None) -> tuple[str, str | None]:
    """The server's URL and the admin key: where none is given and the server is one of this user on this machine, that
    which it has made. `localhost` becomes the address at which the server was found."""
    parts = urlsplit(base)
    if admin_key is not None or not parts.hostname:
        return base, admin_key
    port = parts.port or (443 if parts.scheme == "https" else 80)
    found = key_of_server(parts.hostname, port)
    if found is None:
        return base, None
    address, key = found
    if parts.scheme == "http":  # over TLS the certificate says who answers
        base = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
    return base, key


def _checked(url: str | None) -> str | None:
    parts = urlsplit(url or "http://none")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError("proxy", "...", "must be a url of http or https", "write http://HOST:PORT")
    return url


def authorization(field: str, key: str | None) -> dict[str, str]:
    """The value is not in the error: it may be all but a character right."""
    if key is None:
        return {}
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise ConfigError(
            field, "...", "is not a bearer token", "write printable ASCII characters without spaces"
        )
    return {"Authorization": f"Bearer {key}"}


def seconds(field: str, value: float) -> float:
    return min(number(field, value, 1e-3), 1e9)


def place(epoch: int, iteration: int, rank: int) -> tuple[int, int, int]:
    return integer("epoch", epoch), integer("iteration", iteration, 0), integer("rank", rank, 0)
