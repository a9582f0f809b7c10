"""Credentials: bearer tokens, the cluster's shared token, roles in certificates, and files of them that change.

A token is sent as metadata `authorization: Bearer TOKEN`, over HTTP in the header of that name. Services of one cluster
may share a token: a file with one token per line, of which the first is sent and each is accepted, so that a token can
be changed without a moment in which services disagree.

A certificate has its holder's role in a URI among its alternative names: `spiffe://lorrery/worker`.

Keys, tokens and certificates are read again when their files change, without a restart (`Watched`). There is no task
and no timer: reading the value checks the files, at most once a second. If files are broken or missing, the previous
value stays, and each such change is logged once.

A service that anyone who reaches it may use logs a warning (`warn_if_exposed`).
"""

import hmac
import os
import time
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc.aio

from lorrery.service.errors import SettingsError
from lorrery.service.settings.sections import TlsSettings
from lorrery.service.telemetry.log import get_logger

LOOK_SECONDS = 1.0
"""Minimum time between two checks of the files."""

_T = TypeVar("_T")
_Stamp = tuple[int, int, int] | None


class Watched(Generic[_T]):
    """A value read from files, kept up to date.

    Args:
        paths: of the files.
        read: builds the value; raises `SettingsError` if it cannot.

    Raises:
        SettingsError: the files cannot be read now.
    """

    def __init__(self, paths: Iterable[Path], read: Callable[[], _T]) -> None:
        self._paths, self._read = tuple(paths), read
        self._stamps = self._look()
        self._value = read()
        self._looked = time.monotonic()

    def current(self) -> _T:
        """Return the value, at most a second old: the same object until it changes."""
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            found = self._look()
            if found != self._stamps:
                self._stamps = found
                self._read_again()
        return self._value

    def _look(self) -> list[_Stamp]:
        return [_stamp(path) for path in self._paths]

    def _read_again(self) -> None:
        log = get_logger("service.files.watched")
        paths = ", ".join(map(str, self._paths))
        try:
            self._value = self._read()
        except SettingsError as error:
            log.error("file_not_reread", path=paths, reason=str(error), in_force="what it said before")
        else:
            log.info("file_reread", path=paths)


def _stamp(path: Path) -> _Stamp:
    """Return a stamp that changes whenever a file is replaced or written; None: the file cannot be checked."""
    try:
        status = os.stat(path)  # noqa: PTH116  a third of the time of Path.stat
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


MIN_TOKEN_CHARACTERS = 16
"""Shorter tokens can be guessed."""
ROLE_URI = "spiffe://lorrery/"
_SCHEME = "bearer "

Metadata = tuple[tuple[str, str], ...]
Context = grpc.aio.ServicerContext[Any, Any]


class Role(StrEnum):
    """Role of a certificate's holder in a cluster."""

    ROUTER = "router"
    SCHEDULER = "scheduler"
    WORKER = "worker"
    CLIENT = "client"
    OPERATOR = "operator"


def bearer(token: str) -> Metadata:
    """Return the metadata that carries a token."""
    return (("authorization", f"Bearer {token}"),)


def authorization(context: Context) -> str:
    """Return a call's `authorization`; empty: none."""
    return next(iter(metadata_values(context, "authorization")), "")


def metadata_values(context: Context, key: str) -> list[str]:
    """Return all metadata values of a call under a key, in order."""
    return [
        value if isinstance(value, str) else value.decode("latin-1")
        for name, value in context.invocation_metadata() or ()
        if name == key
    ]


def token_of(authorization: str) -> str:
    """Return the token in an `authorization` value; empty: none, or another scheme."""
    if authorization[: len(_SCHEME)].lower() != _SCHEME:
        return ""
    return authorization[len(_SCHEME) :].strip()


def certificate_roles(context: Context) -> frozenset[str]:
    """Return the roles in the caller's certificate; empty: no certificate, or one without roles."""
    names = (context.auth_context() or {}).get("x509_subject_alternative_name", ())
    return _roles(name.decode("utf-8", "replace") for name in names)


def roles_in(certificate: Mapping[str, Any] | None) -> frozenset[str]:
    """Return the roles in a certificate from the standard library's `getpeercert`; None: no certificate."""
    return _roles(value for kind, value in (certificate or {}).get("subjectAltName", ()) if kind == "URI")


def _roles(names: Iterable[str]) -> frozenset[str]:
    return frozenset(name.removeprefix(ROLE_URI) for name in names if name.startswith(ROLE_URI))


class ClusterToken:
    """The token shared by the services of a cluster.

    Args:
        path: file with one token per line; None: no token is sent or required.

    Raises:
        SettingsError: the file cannot be read, or has no token or one that is too short.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else Watched((path,), lambda: _read_tokens(path))

    @property
    def required(self) -> bool:
        """Whether callers need a token."""
        return self._file is not None

    def metadata(self) -> Metadata:
        """Return the metadata that a service sends to another one."""
        return () if self._file is None else bearer(self._file.current()[0])

    def accepts(self, token: str) -> bool:
        """Return whether a token is one of the cluster's; takes the same time for every wrong one."""
        if self._file is None:
            return True
        shown = token.encode()
        matches = [hmac.compare_digest(known.encode(), shown) for known in self._file.current()]
        return any(matches)


def _read_tokens(path: Path) -> tuple[str, ...]:
    try:
        tokens = tuple(path.read_text(encoding="utf-8").split())
    except OSError as error:
        raise SettingsError(f"cluster_token: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"cluster_token: {path} is not text") from None
    if not tokens:
        raise SettingsError(f"cluster_token: {path} is empty; write a token into it: openssl rand -hex 32")
    if (
        any(not token.isascii() or not token.isprintable() for token in tokens)
        or min(map(len, tokens)) < MIN_TOKEN_CHARACTERS
    ):
        raise SettingsError(
            f"cluster_token: {path} has a token of less than {MIN_TOKEN_CHARACTERS} ASCII characters;"
            " openssl rand -hex 32 makes one"
        )
    return tokens


def warn_if_exposed(setting: str, listen: str, tls: TlsSettings, *, protected: bool, cure: str) -> None:
    """Log a warning if a service listens beyond loopback and needs no credentials, or receives keys without TLS.

    Args:
        setting: origin of `listen`.
        listen: HOST:PORT.
        tls: of the server.
        protected: whether callers need credentials.
        cure: what to set.
    """
    if is_loopback(listen):
        return
    log = get_logger("service")
    if not protected:
        log.warning("open_to_everybody", setting=setting, listen=listen, why="callers show no credentials", cure=cure)
    elif tls.cert is None:
        log.warning(
            "credentials_in_the_clear", setting=setting, listen=listen, why="no TLS", cure="set server_tls.cert and key"
        )


def is_loopback(listen: str) -> bool:
    """Return whether HOST:PORT is reachable from this machine only."""
    host = listen.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
