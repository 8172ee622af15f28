"""How to serve, and TLS as that says."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from apportion.ir.errors import ConfigError
from apportion.service.http.api.bodies import Patience
from apportion.service.http.logs import Format
from apportion.service.limits import Limits


@dataclass(frozen=True)
class Options:
    """How to serve. admin: digest of the admin key (`auth.key_digest`), None for none; metrics: of the key for
    /metrics alone; shown: the admin key, for clients of this user to find; admin_file: where it is. folder: of the
    audit log, None for none. worker_bytes: memory of each worker beyond what it begins with, 0 for no limit.
    standby: wait while another server has the store.
    public_url: how clients call the server, before the paths in answers. parent: process that this one ends with,
    None for its own life. renew: called on SIGHUP, gives the admin key, and the digests of it and of that for
    metrics. Raises ConfigError."""

    host: str = "127.0.0.1"
    port: int = 8321
    store: Path | str = field(default=Path(".apportion"), repr=False)
    redis_password: str | None = field(default=None, repr=False)
    workers: int | Literal["ray"] = 1
    worker_bytes: int = 8 << 30
    admin: bytes | None = None
    metrics: bytes | None = None
    shown: str | None = field(default=None, repr=False)
    admin_file: Path | None = None
    folder: Path | None = None
    public_url: str = ""
    standby: bool = False
    keyfile: Path | None = None
    certfile: Path | None = None
    ca_certs: Path | None = None
    log_format: Format = "text"
    limits: Limits = field(default_factory=Limits)
    patience: Patience = field(default_factory=Patience)
    parent: int | None = None
    renew: Callable[[], tuple[str | None, tuple[bytes | None, bytes | None]]] | None = None

    def __post_init__(self) -> None:
        if self.ca_certs is not None and self.certfile is None:
            rule = "clients show certificates only over TLS"
            raise ConfigError(
                "--ssl-ca-certs", str(self.ca_certs), rule, "name --ssl-keyfile and --ssl-certfile"
            )
        if self.public_url and not re.fullmatch(
            r"https?://[A-Za-z0-9._\[\]:-]+(/[A-Za-z0-9._~/-]*)?", self.public_url
        ):
            rule = "is no URL of a server"
            raise ConfigError("--public-url", self.public_url, rule, "write https://HOST:PORT")
        if (self.keyfile is None) != (self.certfile is None):
            rule = "key and certificate belong together"
            raise ConfigError(
                "--ssl-keyfile", str(self.keyfile), rule, "name both --ssl-keyfile and --ssl-certfile"
            )

    @property
    def scheme(self) -> str:
        return "http" if self.certfile is None else "https"


def context_of(options: Options) -> ssl.SSLContext | None:
    """TLS as the options say, None for none. Raises ConfigError, which names the file."""
    if options.certfile is None or options.keyfile is None:
        return None
    for flag, path in (("--ssl-keyfile", options.keyfile), ("--ssl-certfile", options.certfile)):
        _check_readable(flag, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(options.certfile, options.keyfile, password=_no_password)
    except (OSError, ssl.SSLError, ValueError) as error:
        rule = f"and the key {options.keyfile} are no pair ({error})"
        remedy = "name two PEM files that belong together"
        raise ConfigError("--ssl-certfile", str(options.certfile), rule, remedy) from None
    if options.ca_certs is not None:
        _check_readable("--ssl-ca-certs", options.ca_certs)
        try:
            context.load_verify_locations(options.ca_certs)
        except (OSError, ssl.SSLError) as error:
            rule = f"has no certificates ({error})"
            raise ConfigError("--ssl-ca-certs", str(options.ca_certs), rule, "name a PEM file") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check_readable(flag: str, path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        rule = f"cannot be read: {(error.strerror or str(error)).lower()}"
        raise ConfigError(flag, str(path), rule, "name a PEM file that this user can read") from None


def _no_password() -> str:
    raise ValueError("the key is encrypted: write it without a password, in a file of mode 0600")
