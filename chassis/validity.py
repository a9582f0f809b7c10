"""The validity period of a certificate, and a warning outside it.

An expired certificate fails far from its cause: gRPC reports "unable to get local issuer certificate" or "Socket
closed" to the side that dials. So the side that presents the certificate warns. The standard library exposes these
dates only for a peer's certificate after a handshake, and cryptography is an extra; hence a few lines of DER parsing
(ITU-T X.690, RFC 5280, section 4.1).
"""

import math
import re
import time
from binascii import a2b_base64
from calendar import timegm
from collections.abc import Iterator
from pathlib import Path

from lorrery.chassis.log import get_logger

_CERTIFICATE = re.compile(rb"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----(.*?)-----END ", re.DOTALL)
_VERSION, _UTC_TIME = 0xA0, 0x17


class Validity:
    """The validity period of one certificate.

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
        get_logger("chassis.validity").warning(
            "certificate_expired" if now > self._end else "certificate_not_valid_yet",
            setting=self._setting,
            path=str(self._path),
            holds_from=_text(self._begin),
            holds_to=_text(self._end),
            effect="peers that check it refuse new connections",
        )


def holds(pem: bytes) -> tuple[float, float]:
    """Return the validity period of the first certificate of a PEM file, as two Unix times.

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
