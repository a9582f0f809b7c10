"""`lorrery certs`: makes a certificate authority for development, and a certificate for each role in a cluster."""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

import typer

from lorrery.cli.flags import VersionOption
from lorrery.service.commands import Command, command_app
from lorrery.service.errors import LorreryError, SettingsError
from lorrery.service.installed import need_extra
from lorrery.service.network.credentials import ROLE_URI, Role

need_extra("certs", "lorrery certs")
from cryptography import x509  # noqa: E402
from cryptography.hazmat.primitives import hashes, serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID  # noqa: E402

HOSTS = ("localhost", "127.0.0.1", "::1")
CLUSTER = "cluster"
"""Name of a certificate with the roles of all services, for services that share one settings file."""
_SERVICES = (Role.ROUTER, Role.SCHEDULER, Role.WORKER)
_CA_DAYS = 3650
_BACKDATED = timedelta(minutes=5)
"""Allows for clocks that differ."""

app = command_app()


@app.command(cls=Command)
def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write to.")],
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME", help="Name or address at which services are reached; repeatable."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="Validity of the certificates.")] = 365,
    version: VersionOption = False,
) -> None:
    """Create a certificate authority for development, and a certificate for each role in a cluster.

    If the folder already contains an authority, it is kept and signs new certificates, which replace the previous ones;
    services pick them up without a restart.
    Files: ca.pem, and NAME.pem with NAME.key for router, scheduler, worker, client, operator, and for cluster, which
    has the roles of all three services.

    Examples:
      lorrery certs certs
      lorrery certs certs --host scheduler --host router.example.org --days 30
    """
    del version
    all_hosts = [*HOSTS, *(hosts or ())]
    names, made = _alternative_names(all_hosts), [*Role, CLUSTER]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replaced = [name for name in made if (folder / f"{name}.pem").exists()]
        ca, ca_key, ca_done = _authority(folder)
        for role in Role:
            _write(folder, role, *_signed(role, (role,), names if role in _SERVICES else [], ca, ca_key, days))
        _write(folder, CLUSTER, *_signed(CLUSTER, _SERVICES, names, ca, ca_key, days))
    except OSError as error:
        raise LorreryError(f"{folder}: {error.strerror}") from None
    typer.echo(f"{ca_done} {folder}/ca.pem, wrote certificates for {', '.join(made)}; docs/security.md says more")
    if replaced:
        typer.echo(
            f"replaced the previous ones of {', '.join(replaced)}; the services' are now for {', '.join(all_hosts)}"
        )


def _alternative_names(hosts: list[str]) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = []
    for host in hosts:
        try:
            names.append(x509.IPAddress(ip_address(host)))
        except ValueError:
            try:
                names.append(x509.DNSName(host))
            except ValueError:
                raise SettingsError(f"--host {host}: not a host name or address") from None
    return names


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey, str]:
    """Read the folder's authority, or make one if there is none; return what was done too: kept or wrote."""
    certificate, key_file = folder / "ca.pem", folder / "ca.key"
    if certificate.exists() and key_file.exists():
        try:
            found = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
            ca = x509.load_pem_x509_certificate(certificate.read_bytes())
        except ValueError as error:
            raise LorreryError(f"{folder}: ca.pem and ca.key are not a certificate authority: {error}") from None
        if not isinstance(found, ec.EllipticCurvePrivateKey):
            raise LorreryError(f"{key_file}: not a key made by lorrery certs; use another folder")
        return ca, found, "kept"
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("development CA")
    now = datetime.now(UTC)
    ca = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + timedelta(days=_CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(folder, "ca", ca, key)
    return ca, key, "wrote"


def _signed(
    name: str,
    roles: tuple[Role, ...],
    hosts: list[x509.GeneralName],
    ca: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
    days: int,
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Make a certificate; only one with hosts may be used by a server."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
    uris = [x509.UniformResourceIdentifier(f"{ROLE_URI}{role}") for role in roles]
    certificate = (
        x509.CertificateBuilder(ca.subject, _name(name), key.public_key(), x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([*hosts, *uris]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    return certificate, key


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str) -> x509.Name:
    return x509.Name(
        [x509.NameAttribute(NameOID.ORGANIZATION_NAME, "lorrery"), x509.NameAttribute(NameOID.COMMON_NAME, common)]
    )


def _write(folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    """Write both files, each atomically: services may be reading them."""
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    for suffix, content, mode in (
        (".key", secret, 0o600),
        (".pem", certificate.public_bytes(serialization.Encoding.PEM), 0o644),
    ):
        new = folder / f".{name}{suffix}"
        new.touch(mode)
        new.chmod(mode)
        new.write_bytes(content)
        new.replace(folder / f"{name}{suffix}")
