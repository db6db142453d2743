"""The certificates of a cluster: its CA, its components' and its administrator's."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.stage.certificates import Authority


class Files:
    """What a CA signs, as PEM files of a folder: NAME.crt and NAME.key; its own is CA.crt."""

    def __init__(self, folder: Path, ca: str) -> None:
        self._folder, self._ca, self._authority = folder, ca, Authority(ca)
        (folder / f"{ca}.crt").write_bytes(self._authority.pem)

    def sign(
        self, name: str, common_name: str, organization: str = "", hosts: Sequence[str] = ()
    ) -> None:
        certificate, key = self._authority.issue(
            common_name, organization=organization, hosts=hosts
        )
        (self._folder / f"{name}.crt").write_bytes(certificate)
        _write_secret(self._folder / f"{name}.key", key)

    def kubeconfig(self, name: str, server: str) -> None:
        """NAME.conf for a client whose certificate is NAME.crt."""

        def data(file: str) -> str:
            return base64.b64encode((self._folder / file).read_bytes()).decode()

        cluster = {"server": server, "certificate-authority-data": data(f"{self._ca}.crt")}
        user = {
            "client-certificate-data": data(f"{name}.crt"),
            "client-key-data": data(f"{name}.key"),
        }
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "cluster", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "cluster", "context": {"cluster": "cluster", "user": name}}],
            "current-context": "cluster",
        }
        _write_secret(self._folder / f"{name}.conf", json.dumps(config).encode())


def token_keys(folder: Path) -> None:
    """sa.key and sa.pub, which sign and verify service accounts' tokens (RS256)."""
    key = rsa.generate_private_key(65537, 2048)
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _write_secret(folder / "sa.key", private)
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "sa.pub").write_bytes(public)


def _write_secret(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)
