"""Signed fleet commands: forged, replayed and old ones are refused, and old releases read them."""

import random
from pathlib import Path

import msgspec
import pytest

from events.plane.facts import VERSION, Control, decode, encode
from router.config.settings.keys_settings import ControlSettings
from router.keys.control_keys import ControlKeys, new_key
from router.replicas import seal as module
from router.replicas.seal import WINDOW_S, Seal

DRAIN = Control(VERSION, "r1-1", "drain", "w0", 0.0, 1000.0, "operators")


class Routers:
    """Seals on one clock, each with a key of its own unless one is given."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 1000.0
        self.seed, self.public = new_key()
        self._folder = folder
        self._rng = random.Random(17)

    def seal(
        self, seed: str | None = "", *, fleet: str = "default", require_signed: bool = False
    ) -> Seal:
        """seed: empty: the routers' common one; None: a router without a key."""
        keys = None
        if seed is not None:
            file = self._folder / "control.nk"
            file.write_text(seed or self.seed)
            keys = ControlKeys(ControlSettings(key_file=str(file)))
        return Seal(
            keys,
            fleet=fleet,
            require_signed=require_signed,
            clock=lambda: self.now_s,
            random_bytes=self._rng.randbytes,
        )


@pytest.fixture
def routers(tmp_path: Path) -> Routers:
    return Routers(tmp_path)


def received(control: Control) -> Control:
    """A command after its way over NATS."""
    came = decode(Control, encode(control))
    assert isinstance(came, Control)
    return came


def test_a_signed_command_is_taken_once(routers: Routers) -> None:
    reader = routers.seal(require_signed=True)
    message = received(routers.seal().sealed(DRAIN))
    assert reader.opened(message) == DRAIN
    assert reader.opened(message) is None
    assert reader.counts == {"signed": 1, "replayed": 1}


def test_the_same_command_said_again_is_another_message(routers: Routers) -> None:
    reader, signer = routers.seal(require_signed=True), routers.seal()
    assert reader.opened(received(signer.sealed(DRAIN))) == DRAIN
    assert reader.opened(received(signer.sealed(DRAIN))) == DRAIN


def test_forged_commands_are_refused_with_and_without_the_switch(routers: Routers) -> None:
    signed = routers.seal().sealed(DRAIN)
    other = msgspec.structs.replace(DRAIN, action="remove")
    flipped = bytes([signed.signature[0] ^ 1]) + signed.signature[1:]
    forgeries = [
        routers.seal(new_key()[0]).sealed(DRAIN),
        routers.seal(fleet="other").sealed(DRAIN),
        msgspec.structs.replace(signed, signature=flipped),
        msgspec.structs.replace(signed, signature=b"short"),
        msgspec.structs.replace(signed, body=routers.seal().sealed(other).body),
        msgspec.structs.replace(signed, body=b""),
        msgspec.structs.replace(signed, body=b"\xc1nonsense"),
        routers.seal().sealed(signed),
    ]
    for require_signed in (False, True):
        reader = routers.seal(require_signed=require_signed)
        assert [reader.opened(received(forgery)) for forgery in forgeries] == [None] * 8
        assert reader.counts == {"forged": 8}


def test_the_signed_body_counts_and_not_the_fields_beside_it(routers: Routers) -> None:
    signed = routers.seal().sealed(DRAIN)
    changed = msgspec.structs.replace(signed, action="remove", worker_id="w9", by="mallory")
    assert routers.seal().opened(received(changed)) == DRAIN


def test_random_bytes_in_the_place_of_a_body_are_refused(routers: Routers) -> None:
    rng, reader = random.Random(17), routers.seal()
    signed = routers.seal().sealed(DRAIN)
    for _ in range(300):
        body = bytearray(signed.body)
        for _ in range(rng.randrange(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        if body != signed.body:
            assert reader.opened(msgspec.structs.replace(signed, body=bytes(body))) is None


@pytest.mark.parametrize(("late_s", "taken"), [(0.99, True), (1.01, False), (-0.99, True)])
def test_a_command_counts_for_the_window_around_its_time(
    routers: Routers, late_s: float, taken: bool
) -> None:
    message = received(routers.seal().sealed(DRAIN))
    reader = routers.seal()
    routers.now_s += late_s * WINDOW_S
    assert (reader.opened(message) == DRAIN) is taken
    assert reader.counts == {"signed" if taken else "stale": 1}


def test_nonces_are_bounded_and_a_forgotten_one_opens_nothing(
    routers: Routers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NONCES_MAX", 8)
    signer, reader = routers.seal(), routers.seal()
    messages = []
    for _ in range(12):
        routers.now_s += 1.0
        messages.append(received(signer.sealed(DRAIN)))
        assert reader.opened(messages[-1]) == DRAIN
        assert len(reader._nonces) <= 8
    assert [reader.opened(message) for message in messages] == [None] * 12
    assert reader.counts == {"signed": 12, "replayed": 8, "stale": 4}
    routers.now_s += WINDOW_S + 1
    assert reader.opened(received(signer.sealed(DRAIN))) == DRAIN
    assert len(reader._nonces) == 1


def test_unsigned_commands_are_taken_counted_and_warned_about_until_they_are_refused(
    routers: Routers, caplog: pytest.LogCaptureFixture
) -> None:
    lenient, strict = routers.seal(), routers.seal(require_signed=True)
    for _ in range(3):
        assert lenient.opened(received(DRAIN)) == DRAIN
        assert strict.opened(received(DRAIN)) is None
    assert lenient.counts == {"unsigned": 3}
    assert strict.counts == {"unsigned_refused": 3}
    assert len(caplog.records) == 2, "one line of a kind in a minute"


def test_a_router_without_a_key_takes_signed_commands_by_their_plain_fields(
    routers: Routers,
) -> None:
    keyless = routers.seal(None)
    assert keyless.sealed(DRAIN) == DRAIN
    assert keyless.opened(received(routers.seal().sealed(DRAIN))) == DRAIN
    assert keyless.counts == {"unsigned": 1}


def test_a_release_without_signatures_reads_a_signed_command(routers: Routers) -> None:
    class OldControl(msgspec.Struct, frozen=True, omit_defaults=True):
        v: int
        id: str
        action: str
        worker_id: str
        tombstone_s: float = 0.0
        at_s: float = 0.0
        by: str = ""

    old = msgspec.msgpack.decode(encode(routers.seal().sealed(DRAIN)), type=OldControl)
    assert msgspec.structs.astuple(old) == msgspec.structs.astuple(DRAIN)[:7]
