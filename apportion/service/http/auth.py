"""Bearer keys: the server's admin key and one for its figures, and keys of jobs. Only their digests are kept.

| key | opens |
|---|---|
| admin | everything |
| metrics | /metrics, /docs, /openapi.json |
| of a job, role `submit` | all that is the job's, but for deleting it and its keys |
| of a job, role `read` | the job, its epochs, iterations and plans, to read; an epoch that has begun |
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from hmac import compare_digest
from ipaddress import ip_address

from apportion.ir.errors import ConfigError
from apportion.ir.hashing import digest
from apportion.service.engine import JobKey
from apportion.service.errors import AuthError, ForbiddenError

MIN_KEY, MAX_KEY = 16, 256
KEY = rf"^[\x21-\x7e]{{{MIN_KEY},{MAX_KEY}}}$"
_WRONG_ADMIN = (
    "this needs the server's admin key, and another one or none was sent: it is in admin.key of the server's --dir, or "
    "in its --admin-key-file"
)
_WRONG_JOB = (
    "the key sent opens no job of this name: it is another job's, it was revoked, or the job was deleted"
)
_READER = "this key only reads: a key of the job with the role `submit` does this"
_ASK = "send the header 'Authorization: Bearer KEY'"


def new_key() -> str:
    """256 random bits as 43 letters, digits, `-` and `_`."""
    return secrets.token_urlsafe(32)


def key_digest(key: str, field: str = "key") -> bytes:
    """32 bytes. A fast digest will do: a key is long and random, nobody can try them all. Raises ConfigError."""
    if not (key.isascii() and key.isprintable() and " " not in key and MIN_KEY <= len(key) <= MAX_KEY):
        rule = f"must be {MIN_KEY} to {MAX_KEY} printable ASCII characters without spaces"
        raise ConfigError(field, "(hidden)", rule, f"take a random one, such as {new_key()}")
    return digest(key.encode())


class Keys:
    """Who may do what. admin: digest of the admin key, None where the server has none and trusts its machine; metrics:
    of one that opens what is told about the server, None for none."""

    def __init__(self, admin: bytes | None, metrics: bytes | None = None) -> None:
        self.admin, self.metrics = admin, metrics

    def check_admin(self, authorization: bytes | None, host: str) -> None:
        """host: as the client calls the server. Raises AuthError."""
        if self.admin is None:
            _check_near(host)
        elif authorization is None or not compare_digest(self.admin, given(authorization)):
            raise AuthError(_WRONG_ADMIN)

    def check_figures(self, authorization: bytes | None, host: str) -> None:
        """For what is told about the server: the admin key or that for metrics, where there are keys. Raises
        AuthError."""
        if self.admin is None:
            _check_near(host)
            return
        sent = given(authorization)
        if not self._is_admin(sent) and not (self.metrics and compare_digest(self.metrics, sent)):
            raise AuthError("this needs the server's admin key, or that of its --metrics-key-file")

    def check_job(self, keys: Sequence[JobKey], sent: bytes, writes: bool = False) -> str:
        """Who sent this digest, for the log. keys: of the job, none where there is no such job, which only the admin is
        told. writes: whether a key that only reads will not do. Raises AuthError, ForbiddenError."""
        for key in keys:
            if compare_digest(key.digest, sent):
                if writes and key.role == "read":
                    raise ForbiddenError(_READER)
                return f"{key.role}:{key.id}"
        if not self._is_admin(sent):
            raise AuthError(_WRONG_JOB)
        return "admin"

    def check_owner(self, keys: Sequence[JobKey], authorization: bytes | None, host: str) -> None:
        """The admin key, for one job, whose own keys are not enough. Raises AuthError, ForbiddenError."""
        if self.admin is None:
            _check_near(host)
            return
        sent = given(authorization)
        if self._is_admin(sent):
            return
        if any(compare_digest(key.digest, sent) for key in keys):
            raise ForbiddenError("only the admin key does this, this is a key of the job")
        raise AuthError(_WRONG_ADMIN)

    def check_reader(self, keys: Sequence[JobKey], authorization: bytes | None, host: str) -> None:
        """Who looks at a job: with a key of it or the admin's; without an admin key no other is needed on this machine.
        keys: as of `check_job`. Raises AuthError."""
        if self.admin is None and authorization is None:
            _check_near(host)
            return
        self.check_job(keys, given(authorization))

    def _is_admin(self, sent: bytes) -> bool:
        return self.admin is not None and compare_digest(self.admin, sent)


def _check_near(host: str) -> None:
    """Without an admin key a server trusts its machine, but no web page on it: a page may have its own name lead here
    (DNS rebinding), an address or `localhost` it may not call its own. Raises AuthError."""
    name = re.sub(r":[0-9]*$", "", host).strip("[]").lower()
    with suppress(ValueError):
        ip_address(name)
        return
    if name not in ("", "localhost"):
        rule = "this server has no admin key, so it is to be called by its address or localhost"
        raise AuthError(f"{rule}, not {host[:64]!r}: do so, or start it without --insecure")


def given(authorization: bytes | None) -> bytes:
    """Digest of the bearer key in an Authorization header. Raises AuthError."""
    if authorization is None:
        raise AuthError(f"no key was sent: {_ASK}")
    if authorization[:7].lower() != b"bearer ":
        raise AuthError(f"the Authorization header has no bearer key: {_ASK}")
    return digest(authorization[7:].strip())
