"""Certificates for tests: an authority, and what it signs."""

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from router.config.settings.keys_settings import TlsSettings

DAY = datetime.timedelta(days=1)


class Authority:
    """A CA."""

    def __init__(self, name: str = "authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        builder = _builder(self._name, self._name, self._key, _now() - DAY, _now() + DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        self._certificate = builder.sign(self._key, hashes.SHA256())
        self.pem = self._certificate.public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        name: str = "router",
        *,
        organization: str = "",
        hosts: Sequence[str] = ("127.0.0.1", "localhost"),
        uris: Sequence[str] = (),
        expired: bool = False,
    ) -> tuple[bytes, bytes]:
        """A certificate and its key, in PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        end = _now() - datetime.timedelta(hours=1) if expired else _now() + DAY
        builder = _builder(_name(name, organization), self._name, key, _now() - DAY, end)
        names = [*map(_host, hosts), *map(x509.UniformResourceIdentifier, uris)]
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
        certificate = builder.sign(self._key, hashes.SHA256())
        return certificate.public_bytes(serialization.Encoding.PEM), key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )


def written(
    folder: Path, pair: tuple[bytes, bytes], client_ca: Authority | None = None
) -> TlsSettings:
    """Writes a certificate and its key, and the CA of callers; the settings that name the files."""
    (folder / "tls.crt").write_bytes(pair[0])
    (folder / "tls.key").write_bytes(pair[1])
    if client_ca is not None:
        (folder / "ca.crt").write_bytes(client_ca.pem)
    return TlsSettings(
        certificate_file=str(folder / "tls.crt"),
        key_file=str(folder / "tls.key"),
        client_ca_file=None if client_ca is None else str(folder / "ca.crt"),
    )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    begin: datetime.datetime,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
    )


def _name(name: str, organization: str = "") -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
    if organization:
        parts.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    return x509.Name(parts)


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
