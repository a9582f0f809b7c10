import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from structlog.testing import capture_logs

from lorrery.service.network import credentials
from lorrery.service.network.tls import Validity, holds, watched_pems
from lorrery.service.settings.sections import TlsSettings

KEY = ec.generate_private_key(ec.SECP256R1())
NOW = datetime.now(UTC).replace(microsecond=0)
DAY = timedelta(days=1)


def certificate(begin: datetime, end: datetime) -> bytes:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "server")])
    builder = x509.CertificateBuilder(name, name, KEY.public_key(), x509.random_serial_number())
    signed = builder.not_valid_before(begin).not_valid_after(end).sign(KEY, hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        (datetime(1961, 2, 3, 4, 5, 6, tzinfo=UTC), datetime(1999, 12, 31, 23, 59, 59, tzinfo=UTC)),
        (NOW, NOW + 90 * DAY),
        (datetime(2049, 12, 31, tzinfo=UTC), datetime(2050, 1, 1, tzinfo=UTC)),
        (datetime(2051, 2, 3, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)),
    ],
)
def test_the_dates_of_a_certificate_are_read(begin: datetime, end: datetime):
    chain = b"subject=server\n" + certificate(begin, end) + certificate(NOW, NOW + DAY)
    assert holds(chain) == (begin.timestamp(), end.timestamp())
    assert holds(chain.replace(b" CERTIFICATE", b" X509 CERTIFICATE")) == (begin.timestamp(), end.timestamp())


def test_a_date_that_is_none_is_no_reason_to_warn():
    with capture_logs() as events:
        wrong = certificate(NOW - 2 * DAY, NOW - DAY)
        der = x509.load_pem_x509_certificate(wrong).public_bytes(serialization.Encoding.DER)
        text = (NOW - DAY).strftime("%y%m%d%H%M%SZ").encode()
        pem = x509_pem(der.replace(text, b"not a date!!!"))
        Validity("server_tls.cert", Path("server.pem"), pem).warn_outside()
    assert events == []


def x509_pem(der: bytes) -> bytes:
    return ssl.DER_cert_to_PEM_cert(der).encode()


def test_who_shows_a_certificate_that_does_not_hold_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(credentials, "LOOK_SECONDS", 0.0)
    cert, key = tmp_path / "server.pem", tmp_path / "server.key"
    cert.write_bytes(certificate(NOW - DAY, NOW + DAY))
    key.write_bytes(
        KEY.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    with capture_logs() as events:
        pems = watched_pems(TlsSettings(cert=cert, key=key), "server_tls")
        pems.current()
        assert events == []
        for begin, end in ((NOW - 2 * DAY, NOW - DAY), (NOW + DAY, NOW + 2 * DAY), (NOW - DAY, NOW + 2 * DAY)):
            cert.unlink()
            cert.write_bytes(certificate(begin, end))
            assert pems.current().cert == cert.read_bytes()
            pems.current()
    assert [event["event"] for event in events] == [
        *("file_reread", "certificate_expired"),
        *("file_reread", "certificate_not_valid_yet"),
        "file_reread",
    ]
    assert events[1] == {
        "event": "certificate_expired",
        "log_level": "warning",
        "module": "service.network.tls",
        "setting": "server_tls.cert",
        "path": str(cert),
        "holds_from": (NOW - 2 * DAY).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "holds_to": (NOW - DAY).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "effect": "peers that check it refuse new connections",
    }
