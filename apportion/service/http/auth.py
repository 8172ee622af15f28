"""Bearer keys: one for the server, one for each job. Only their digests are kept."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from hmac import compare_digest
from ipaddress import ip_address

from apportion.ir.errors import ConfigError
from apportion.ir.hashing import digest
from apportion.service.errors import AuthError, ConflictError, ForbiddenError, NotFoundError

MIN_KEY, MAX_KEY = 16, 256
KEY = rf"^[\x21-\x7e]{{{MIN_KEY},{MAX_KEY}}}$"
_WRONG_ADMIN = "this needs the server's admin key (--admin-key-file), the key sent is another one"
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
    """Who may do what. admin: digest of the admin key, None where the server has none and trusts its machine."""

    def __init__(self, admin: bytes | None) -> None:
        self._admin = admin

    def check_admin(self, authorization: bytes | None, host: str) -> None:
        """host: as the client calls the server. Raises AuthError."""
        if self._admin is None:
            _check_near(host)
        elif not compare_digest(self._admin, given(authorization)):
            raise AuthError(_WRONG_ADMIN)

    def check_job(self, job: str, held: bytes, sent: bytes) -> None:
        """The job's key, or the admin key. held, sent: digests. Raises AuthError."""
        if not compare_digest(held, sent) and not self._is_admin(sent):
            raise AuthError(f"the key sent is not that of job {job}, which its creation gave")

    def check_owner(self, job: Callable[[], bytes], authorization: bytes | None, host: str) -> None:
        """The admin key, for one job. job: gives the digest of the job's own key, which is not enough; it may raise
        NotFoundError, which only the admin is told. Raises AuthError, ForbiddenError."""
        if self._admin is None:
            _check_near(host)
            return
        sent = given(authorization)
        if self._is_admin(sent):
            return
        with suppress(NotFoundError, ConflictError):
            if compare_digest(job(), sent):
                raise ForbiddenError("only the admin key deletes jobs, this is the job's own key")
        raise AuthError(_WRONG_ADMIN)

    def check_reader(
        self, job: str, held: Callable[[], bytes], authorization: bytes | None, host: str
    ) -> None:
        """Who looks at a job: with its key or the admin's; without an admin key no other is needed on this machine.
        held: as of `check_owner`. Raises AuthError, and what `held` raises."""
        if self._admin is None and authorization is None:
            _check_near(host)
            return
        sent = given(authorization)
        self.check_job(job, held(), sent)

    def _is_admin(self, sent: bytes) -> bool:
        return self._admin is not None and compare_digest(self._admin, sent)


def _check_near(host: str) -> None:
    """Without an admin key a server trusts its machine, but no web page on it: a page may have its own name lead here
    (DNS rebinding), an address or `localhost` it may not call its own. Raises AuthError."""
    name = re.sub(r":[0-9]*$", "", host).strip("[]").lower()
    with suppress(ValueError):
        ip_address(name)
        return
    if name not in ("", "localhost"):
        rule = "this server has no admin key, so it is to be called by its address or localhost"
        raise AuthError(f"{rule}, not {host[:64]!r}: do so, or start it with --admin-key-file")


def given(authorization: bytes | None) -> bytes:
    """Digest of the bearer key in an Authorization header. Raises AuthError."""
    if authorization is None:
        raise AuthError(f"no key was sent: {_ASK}")
    if authorization[:7].lower() != b"bearer ":
        raise AuthError(f"the Authorization header has no bearer key: {_ASK}")
    return digest(authorization[7:].strip())
