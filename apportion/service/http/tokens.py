"""Bearer tokens: one for everyone, or one per tenant."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from apportion.ir.errors import ConfigError
from apportion.ir.fields import read_text

ANYONE = "anyone"
MIN_LENGTH = 16


@dataclass(frozen=True)
class Tokens:
    """The accepted tokens. tenants: name -> token; if empty, everyone is accepted. Raises ConfigError."""

    tenants: Mapping[str, str] = field(default_factory=dict, repr=False)
    _digests: dict[bytes, tuple[str, bytes]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for tenant, token in self.tenants.items():
            if len(token) < MIN_LENGTH or not token.isascii() or any(letter.isspace() for letter in token):
                rule = f"must be at least {MIN_LENGTH} ASCII characters without spaces"
                raise ConfigError(
                    f"token of {tenant}",
                    "...",
                    rule,
                    "make one with: python -c 'import secrets; print(secrets.token_hex())'",
                )
            wire = b"Bearer " + token.encode()
            self._digests[sha256(wire).digest()] = tenant, wire
        if len(self._digests) < len(self.tenants):
            raise ConfigError("tokens", "...", "two tenants have the same token", "give each a different one")

    def tenant(self, authorization: bytes) -> str | None:
        """The tenant of the token in the header `Authorization`; None for an unknown token. Takes constant time: it
        looks up a digest, and compares the whole token."""
        if not self._digests:
            return ANYONE
        tenant, wire = self._digests.get(sha256(authorization).digest(), ("", b""))
        return tenant if wire and hmac.compare_digest(wire, authorization) else None

    @staticmethod
    def read(token: str | None, tenants: Path | None) -> Tokens:
        """Reads the tokens. token: for everyone; tenants: a file of lines `name: token`. Raises ConfigError."""
        by_tenant = {} if token is None else {ANYONE: token}
        lines = [] if tenants is None else read_text(tenants).splitlines()
        for number, line in enumerate(lines, 1):
            name, colon, value = line.partition(":")
            if line.strip() and not line.startswith("#"):
                if not colon or not name.strip() or name.strip() in by_tenant:
                    rule = "must be `name: token`, each name once"
                    raise ConfigError(f"{tenants}, line {number}", "...", rule, "write one line per tenant")
                by_tenant[name.strip()] = value.strip()
        if tenants is not None and not by_tenant:
            raise ConfigError(str(tenants), "...", "names no tenant", "write a line `name: token` for each")
        return Tokens(by_tenant)
