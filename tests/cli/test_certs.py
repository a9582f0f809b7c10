from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from typer.testing import CliRunner

from lorrery.cli.certs import app
from lorrery.service.errors import LorreryError, SettingsError


def make(folder: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, [str(folder), *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def read(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def uris(certificate: x509.Certificate) -> list[str]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return names.get_values_for_type(x509.UniformResourceIdentifier)


def test_each_certificate_says_its_role_and_only_services_can_be_servers(tmp_path: Path):
    make(tmp_path, "--host", "scheduler.example.org", "--host", "10.0.0.7", "--days", "30")
    for name in ("router", "scheduler", "worker", "client", "operator"):
        certificate = read(tmp_path / f"{name}.pem")
        assert uris(certificate) == [f"spiffe://lorrery/{name}"]
        uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert (ExtendedKeyUsageOID.SERVER_AUTH in uses) == (name not in ("client", "operator"))
        assert (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days == 30
        assert (tmp_path / f"{name}.key").stat().st_mode & 0o777 == 0o600
    names = read(tmp_path / "scheduler.pem").extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "scheduler.example.org"]
    assert "10.0.0.7" in map(str, names.get_values_for_type(x509.IPAddress))
    assert len(uris(read(tmp_path / "cluster.pem"))) == 3


def test_the_authority_of_a_folder_stays(tmp_path: Path):
    said = make(tmp_path)
    assert said.startswith(f"wrote {tmp_path}/ca.pem, wrote certificates for ")
    assert "replaced" not in said
    ca, first = (tmp_path / "ca.pem").read_bytes(), read(tmp_path / "worker.pem")
    said = make(tmp_path, "--host", "scheduler")
    assert said.startswith(f"kept {tmp_path}/ca.pem, wrote certificates for ")
    assert "replaced the previous ones of router, scheduler, worker, client, operator, cluster;" in said
    assert "now for localhost, 127.0.0.1, ::1, scheduler\n" in said
    assert (tmp_path / "ca.pem").read_bytes() == ca
    second = read(tmp_path / "worker.pem")
    assert second.serial_number != first.serial_number
    second.verify_directly_issued_by(read(tmp_path / "ca.pem"))


def test_what_cannot_be_is_said(tmp_path: Path):
    result = CliRunner().invoke(app, [str(tmp_path), "--host", "häuser"])
    assert isinstance(result.exception, SettingsError)
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, [str(tmp_path / "file" / "certs")])
    assert isinstance(result.exception, LorreryError)
