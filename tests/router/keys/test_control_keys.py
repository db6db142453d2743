"""Keys of routers for fleet commands: read from files, rotated, never half."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from router.cli.main import cli
from router.config.keys import ConfigError
from router.config.settings.keys_settings import ControlSettings
from router.keys.control_keys import TRUSTED_MAX, ControlKeys, new_key


def settings(folder: Path, seed: str, *trusted: str) -> ControlSettings:
    (folder / "control.nk").write_text(seed + "\n")
    (folder / "trusted").write_text("# routers\n" + "\n".join(trusted) + "\n")
    return ControlSettings(
        key_file=str(folder / "control.nk"), trusted_keys_file=str(folder / "trusted")
    )


def keys(folder: Path, seed: str, *trusted: str) -> ControlKeys:
    folder.mkdir(exist_ok=True)
    return ControlKeys(settings(folder, seed, *trusted))


def test_a_router_trusts_its_own_key_and_those_of_the_file(tmp_path: Path) -> None:
    (seed, _), (other_seed, other), (strange_seed, _) = new_key(), new_key(), new_key()
    ours = keys(tmp_path / "a", seed, other)
    signers = {
        "own": ours,
        "listed": keys(tmp_path / "b", other_seed),
        "strange": keys(tmp_path / "c", strange_seed),
    }
    trusted = {
        name: ours.verifies(signer.public, b"text", signer.sign(b"text"))
        for name, signer in signers.items()
    }
    assert trusted == {"own": True, "listed": True, "strange": False}
    signature = ours.sign(b"text")
    assert not ours.verifies(ours.public, b"other", signature)
    assert not ours.verifies(ours.public, b"text", signature[:-1])
    assert not ours.verifies(ours.public[:-1], b"text", signature)


def test_a_rotation_is_taken_up_and_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    (old_seed, old), (new_seed, new) = new_key(), new_key()
    ours = keys(tmp_path / "a", old_seed, old)
    successor = keys(tmp_path / "b", new_seed)
    signature = successor.sign(b"text")
    assert not ours.reload()
    assert not ours.verifies(successor.public, b"text", signature)
    settings(tmp_path / "a", old_seed, old, new)
    assert ours.reload()
    assert ours.verifies(successor.public, b"text", signature)
    settings(tmp_path / "a", new_seed, "Unonsense")
    with pytest.raises(ValueError, match="no public NKey"):
        ours.reload()
    assert ours.public != successor.public
    settings(tmp_path / "a", new_seed)
    assert ours.reload()
    assert ours.public == successor.public


def test_the_list_of_public_keys_is_bounded(tmp_path: Path) -> None:
    seed, public = new_key()
    keys(tmp_path, seed, *[public] * TRUSTED_MAX)
    with pytest.raises(ValueError, match=f"over {TRUSTED_MAX}"):
        keys(tmp_path, seed, *[public] * (TRUSTED_MAX + 1))


@pytest.mark.parametrize("content", ["", "S", "nonsense", "public"])
def test_a_file_without_a_seed_is_refused_and_not_shown(content: str, tmp_path: Path) -> None:
    text = new_key()[1] if content == "public" else content
    with pytest.raises(ConfigError, match=r"control: .* holds no NKey seed") as caught:
        ControlKeys.of(settings(tmp_path, text))
    assert len(text) < 56 or text not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        ControlKeys.of(ControlSettings(key_file=str(tmp_path / "none")))


def test_no_key_signs_nothing_and_can_check_nothing() -> None:
    assert ControlKeys.of(ControlSettings()) is None
    for settings in (ControlSettings(require_signed=True), ControlSettings(trusted_keys_file="f")):
        with pytest.raises(ConfigError, match=r"a key is needed.*\$\.control\.key_file"):
            ControlKeys.of(settings)


def test_the_command_prints_a_key_that_can_be_used(tmp_path: Path) -> None:
    seed, public = CliRunner().invoke(cli, ["control-key"]).output.split()
    signer = keys(tmp_path / "a", seed)
    reader = keys(tmp_path / "b", new_key()[0], public)
    assert reader.verifies(signer.public, b"text", signer.sign(b"text"))
