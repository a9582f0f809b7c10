"""Certificates of one side, in gRPC's format; read again when their files change.

A server checks its files at each handshake, a client at each new channel (`service.network.channel.Dialler`); both also
check the validity dates of their certificate then. Existing connections stay up.
"""

import math
import re
import ssl
import time
from binascii import a2b_base64
from calendar import timegm
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc

from lorrery.service.errors import SettingsError
from lorrery.service.network.credentials import Watched
from lorrery.service.settings.sections import TlsSettings
from lorrery.service.telemetry.log import get_logger

_T = TypeVar("_T")
_CERTIFICATE = re.compile(rb"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----(.*?)-----END ", re.DOTALL)
_VERSION, _UTC_TIME = 0xA0, 0x17


@dataclass(frozen=True, slots=True)
class Pems:
    """Contents of the files that the settings name."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None


def read_pems(tls: TlsSettings, section: str) -> Pems:
    """Read the certificates, and check that they are valid PEM and that the key matches the certificate.

    Raises:
        SettingsError: they cannot be used; names the setting.
    """
    found = Pems(*(_read(getattr(tls, name), f"{section}.{name}") for name in ("cert", "key", "ca")))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if tls.cert is not None:
            context.load_cert_chain(tls.cert, tls.key, password="")
    except (ssl.SSLError, OSError, ValueError) as error:
        raise SettingsError(
            f"{section}.cert: {tls.cert} and {tls.key} are no certificate and its key: {error}"
        ) from None
    try:
        if tls.ca is not None:
            context.load_verify_locations(tls.ca)
    except (ssl.SSLError, OSError) as error:
        raise SettingsError(f"{section}.ca: {tls.ca} holds no certificate: {error}") from None
    return found


def watched_pems(tls: TlsSettings, section: str) -> Watched[Pems]:
    """Return the certificates, kept up to date.

    Raises:
        SettingsError: as `read_pems`.
    """
    return _Shown(tls, section, lambda pems: pems)


def server_credentials(tls: TlsSettings) -> grpc.ServerCredentials | None:
    """Return the credentials of a server; None: plain text.

    Raises:
        SettingsError: a certificate is missing, unreadable or wrong.
    """
    if tls.cert is None:
        if tls.ca is not None:
            raise SettingsError("server_tls.ca: needs server_tls.cert and server_tls.key")
        return None
    pems = watched_pems(tls, "server_tls")
    served = pems.current()

    def configuration(now: Pems) -> grpc.ServerCertificateConfiguration:
        assert now.key is not None
        assert now.cert is not None
        return grpc.ssl_server_certificate_configuration([(now.key, now.cert)], root_certificates=now.ca)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        # gRPC's core aborts the process if connections replace a configuration while others use it, so they do that
        # only when files have changed.
        nonlocal served
        now = pems.current()
        if now is served:
            return None
        served = now
        return configuration(now)

    return grpc.dynamic_ssl_server_credentials(
        configuration(served),
        changed,  # type: ignore[arg-type]  # the stubs lack None: nothing has changed
        tls.ca is not None,
    )


def server_contexts(tls: TlsSettings, section: str) -> Watched[ssl.SSLContext] | None:
    """Return the TLS context of a standard-library server, kept up to date; None: plain text.

    Each new connection must use the current context. TLS sessions belong to a context, so that a client whose authority
    was removed cannot resume one; a context that hands connections over to another keeps the sessions of both.

    Raises:
        SettingsError: a certificate is missing, unreadable or wrong.
    """
    cert = tls.cert
    if cert is None:
        return None

    def context(_pems: Pems) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(cert, tls.key, password="")
        if tls.ca is not None:
            context.load_verify_locations(tls.ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    return _Shown(tls, section, context)


class _Shown(Watched[_T]):
    """A value made from certificates, kept up to date.

    Args:
        tls: names the files.
        section: of the settings.
        make: makes the value.
    """

    def __init__(self, tls: TlsSettings, section: str, make: Callable[[Pems], _T]) -> None:
        self._validity: Validity | None = None

        def read() -> _T:
            pems = read_pems(tls, section)
            found = make(pems)
            self._validity = None
            if tls.cert is not None and pems.cert is not None:
                self._validity = Validity(f"{section}.cert", tls.cert, pems.cert)
            return found

        super().__init__([path for path in (tls.cert, tls.key, tls.ca) if path is not None], read)

    def current(self) -> _T:
        found = super().current()
        if self._validity is not None:
            self._validity.warn_outside()
        return found


class Validity:
    """The validity period of one certificate, and a warning outside it.

    An expired certificate fails far from its cause: gRPC reports "unable to get local issuer certificate" or "Socket
    closed" to the side that dials. So the side that presents the certificate warns.

    Args:
        setting: that names its file.
        path: of the file.
        pem: content of the file; its first certificate is the one presented.
    """

    def __init__(self, setting: str, path: Path, pem: bytes) -> None:
        self._setting, self._path = setting, path
        try:
            self._begin, self._end = holds(pem)
        except ValueError:  # OpenSSL accepts dates that no peer does
            self._begin, self._end = -math.inf, math.inf
        self._said = False

    def warn_outside(self) -> None:
        """Log once that the certificate has expired, or is not valid yet."""
        now = time.time()
        if self._said or self._begin <= now <= self._end:
            return
        self._said = True
        get_logger("service.network.tls").warning(
            "certificate_expired" if now > self._end else "certificate_not_valid_yet",
            setting=self._setting,
            path=str(self._path),
            holds_from=_text(self._begin),
            holds_to=_text(self._end),
            effect="peers that check it refuse new connections",
        )


def holds(pem: bytes) -> tuple[float, float]:
    """Return the validity period of the first certificate of a PEM file, as two Unix times.

    The standard library exposes these dates only for a peer's certificate after a handshake, and cryptography is an
    extra; hence a few lines of DER parsing (ITU-T X.690, RFC 5280, section 4.1).

    Args:
        pem: content that OpenSSL has accepted.

    Raises:
        ValueError: a date that RFC 5280 does not allow.
    """
    found = _CERTIFICATE.search(pem)
    assert found is not None
    (_, certificate), *_ = _parts(a2b_base64(found[1]))
    (_, to_be_signed), *_ = _parts(certificate)
    fields = [content for tag, content in _parts(to_be_signed) if tag != _VERSION]
    begin, end = (_seconds(tag, content.decode()) for tag, content in _parts(fields[3]))
    return begin, end


def _parts(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tag and content of each DER element."""
    at = 0
    while at < len(der):
        tag, length, at = der[at], der[at + 1], at + 2
        if length & 0x80:
            num_bytes = length & 0x7F
            length, at = int.from_bytes(der[at : at + num_bytes]), at + num_bytes
        yield tag, der[at : at + length]
        at += length


def _seconds(tag: int, text: str) -> float:
    if tag == _UTC_TIME:
        text = ("19" if text[:1] >= "5" else "20") + text
    return float(timegm(time.strptime(text, "%Y%m%d%H%M%SZ")))


def _text(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _read(path: Path | None, setting: str) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{setting}: {path}: {error.strerror}") from None
