"""The keys by which routers sign fleet commands to one another: NKeys of NATS, which are Ed25519.

Law: a private key is read from its file only, and shown nowhere.
"""

import base64
import binascii
import secrets
from pathlib import Path

import nacl.exceptions
import nacl.signing
import nkeys

from router.config.keys import ConfigError
from router.config.settings.keys_settings import ControlSettings
from router.keys.followed import reason_of

TRUSTED_MAX = 64
"""Public keys: more than a rotation of several deployments needs."""
_FILE_BYTES_MAX = 64 << 10


class ControlKeys:
    """This router's key, and the public keys of routers whose commands it takes."""

    def __init__(self, settings: ControlSettings) -> None:
        """Raises OSError or ValueError for files that can't be used."""
        self._settings = settings
        self._contents: tuple[bytes, bytes] | None = None
        self._own: nacl.signing.SigningKey
        self._trusted: dict[bytes, nacl.signing.VerifyKey] = {}
        """Raw public key -> the key that checks signatures."""
        self.reload()

    @classmethod
    def of(cls, settings: ControlSettings) -> "ControlKeys | None":
        """The keys of a configuration; None: there are none. Raises ConfigError."""
        if settings.key_file is None:
            if settings.require_signed or settings.trusted_keys_file:
                raise ConfigError(
                    "a key is needed to check the signatures of commands - at `$.control.key_file`"
                )
            return None
        try:
            return cls(settings)
        except (OSError, ValueError) as error:
            raise ConfigError(f"control: {reason_of(error)}") from None

    @property
    def public(self) -> bytes:
        """This router's raw public key, 32 bytes."""
        return bytes(self._own.verify_key)

    def reload(self) -> bool:
        settings = self._settings
        assert settings.key_file is not None
        trusted_file = settings.trusted_keys_file
        contents = _read(settings.key_file), _read(trusted_file) if trusted_file else b""
        if contents == self._contents:
            return False
        own = _signing_key(contents[0], settings.key_file)
        keys = [own.verify_key, *_public_keys(contents[1], trusted_file or "")]
        self._own, self._trusted = own, {bytes(key): key for key in keys}
        self._contents = contents
        return True

    def sign(self, message: bytes) -> bytes:
        """The signature, 64 bytes."""
        return self._own.sign(message).signature

    def verifies(self, public: bytes, message: bytes, signature: bytes) -> bool:
        """Whether a trusted router signed a message. public: its raw public key."""
        key = self._trusted.get(public)
        if key is None:
            return False
        try:
            key.verify(message, signature)
        except (nacl.exceptions.BadSignatureError, ValueError):  # ValueError: of another length
            return False
        return True


def new_key() -> tuple[str, str]:
    """A new key: its seed, and its public key, as NATS writes them."""
    seed = nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER)
    pair = nkeys.from_seed(bytearray(seed))
    return seed.decode(), pair.public_key.decode().rstrip("=")


def _read(name: str) -> bytes:
    with Path(name).open("rb") as file:
        content = file.read(_FILE_BYTES_MAX + 1)
    if len(content) > _FILE_BYTES_MAX:
        raise ValueError(f"{name} is over {_FILE_BYTES_MAX} bytes")
    return content


def _signing_key(content: bytes, name: str) -> nacl.signing.SigningKey:
    try:
        _, raw = nkeys.decode_seed(bytearray(content.strip()))
        return nacl.signing.SigningKey(bytes(raw[:32]))
    except (nkeys.NkeysError, ValueError, nacl.exceptions.CryptoError):
        raise ValueError(f"{name} holds no NKey seed: `kvroute control-key` makes one") from None


def _public_keys(content: bytes, name: str) -> list[nacl.signing.VerifyKey]:
    """The keys of a file with one a line; `#` begins a comment."""
    lines = (line.partition(b"#")[0].strip() for line in content.splitlines())
    keys = [_public_key(line, name) for line in lines if line]
    if len(keys) > TRUSTED_MAX:
        raise ValueError(f"{name} holds over {TRUSTED_MAX} public keys")
    return keys


def _public_key(text: bytes, name: str) -> nacl.signing.VerifyKey:
    try:
        raw = base64.b32decode(text)
    except binascii.Error:
        raw = b""
    if len(raw) != 35 or nkeys.crc16_checksum(raw[:33]) != raw[33:]:
        raise ValueError(f"{name} has a line that is no public NKey: that begins with U, say")
    return nacl.signing.VerifyKey(raw[1:33])
