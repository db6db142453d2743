"""Certificates that are read again, and files that can't be."""

import logging
import ssl
from pathlib import Path

import msgspec
import pytest

from router.config.keys import ConfigError
from router.config.settings.keys_settings import TlsSettings
from router.config.settings.serving_settings import MetricsSettings
from router.net.keys.certificates import Certificates, metrics_tls
from router.net.keys.followed import Followed
from tests.stage.certificates import Authority, written


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def test_changed_files_are_read_again_and_equal_ones_are_not(
    tmp_path: Path, authority: Authority
) -> None:
    certificates = Certificates(written(tmp_path, authority.issue()))
    assert certificates.reload() is False
    written(tmp_path, second := authority.issue())
    assert certificates.reload() is True
    assert certificates.pem.certificate == second[0]


def test_half_a_rotation_changes_nothing_and_is_logged_once(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    certificates = Certificates(written(tmp_path, authority.issue()))
    before = certificates.pem
    followed = Followed()
    followed.add("certificates", certificates)
    new = authority.issue()
    (tmp_path / "tls.crt").write_bytes(new[0])  # without its key
    with caplog.at_level(logging.INFO, "kvroute.keys"):
        followed.look()
        followed.look()
        assert certificates.pem is before
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        (tmp_path / "tls.key").write_bytes(new[1])
        followed.look()
    assert certificates.pem.key == new[1]
    assert followed.counts == {("certificates", "ok"): 1, ("certificates", "failed"): 1}


def test_files_that_change_again_while_they_are_used_change_nothing(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = Certificates(written(tmp_path, authority.issue()))
    servers = [certificates.contexts(), certificates.contexts()]
    before = [contexts.now for contexts in servers]
    written(tmp_path, authority.issue())
    load, loads = Certificates._load, []

    def load_twice(self: Certificates, context: ssl.SSLContext) -> None:
        loads.append(context)
        if len(loads) > 2:  # that of the check, and of the first server
            raise ssl.SSLError("key values mismatch")
        load(self, context)

    monkeypatch.setattr(Certificates, "_load", load_twice)
    with pytest.raises(ssl.SSLError, match="mismatch"):
        certificates.reload()
    assert [contexts.now for contexts in servers] == before
    monkeypatch.undo()
    assert certificates.reload() is True
    assert not {*before} & {contexts.now for contexts in servers}


def test_a_file_that_vanishes_changes_nothing(tmp_path: Path, authority: Authority) -> None:
    certificates = Certificates(written(tmp_path, authority.issue()))
    (tmp_path / "tls.key").unlink()
    with pytest.raises(OSError, match=r"tls\.key"):
        certificates.reload()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (TlsSettings(certificate_file="/x"), "a certificate needs its key"),
        (TlsSettings(key_file="/x"), "a certificate needs its key"),
        (TlsSettings(client_ca_file="/x"), "need a certificate of the server"),
        (TlsSettings(certificate_file="/no/such", key_file="/no"), "/no/such: No such file"),
    ],
)
def test_settings_that_contradict_one_another_are_refused(
    settings: TlsSettings, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Certificates.of(settings)


def test_a_file_that_holds_no_certificate_is_refused(tmp_path: Path, authority: Authority) -> None:
    settings = written(tmp_path, authority.issue(), authority)
    (tmp_path / "ca.crt").write_bytes(b"no certificate")
    with pytest.raises(ConfigError, match="can't be used"):
        Certificates(settings)


def test_an_encrypted_key_is_refused_and_not_asked_for(
    tmp_path: Path, authority: Authority
) -> None:
    from cryptography.hazmat.primitives import serialization

    certificate, pem = authority.issue()
    key = serialization.load_pem_private_key(pem, None)
    settings = written(
        tmp_path,
        (
            certificate,
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(b"secret"),
            ),
        ),
    )
    with pytest.raises(ConfigError, match="encrypted"):
        Certificates(settings)


def test_no_server_takes_less_than_tls_1_2(tmp_path: Path, authority: Authority) -> None:
    context = Certificates(written(tmp_path, authority.issue())).contexts().now
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_metrics_need_the_files_that_their_setting_speaks_of(
    tmp_path: Path, authority: Authority
) -> None:
    certificates = Certificates(written(tmp_path, authority.issue()))
    server, mutual = MetricsSettings(tls="server"), MetricsSettings(tls="mutual")
    assert metrics_tls(MetricsSettings(), certificates) is None
    assert metrics_tls(server, certificates) is not None
    with pytest.raises(ConfigError, match=r"client_ca_file"):
        metrics_tls(mutual, certificates)
    with pytest.raises(ConfigError, match=r"certificate_file"):
        metrics_tls(server, None)
    settings = written(tmp_path, authority.issue(), authority)
    assert msgspec.structs.asdict(settings)["client_ca_file"] is not None
    context = metrics_tls(mutual, Certificates(settings))
    assert context is not None
    assert context.now.verify_mode is ssl.CERT_REQUIRED
