"""Encodes text as token ids, little-endian 32-bit integers.

Law: an encoder gives the ids of the `tokenizers` package for the same file, or is refused on load.
"""

import sys
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from router.request.rendering.added_tokens import with_added_tokens
from router.request.rendering.folder import TokenizerFolder, no_tokenizer

TOKEN_BYTES = 4


class Encoder(ABC):
    """One tokenizer, without truncation or padding. Not for two threads at once."""

    def __init__(self, tokenizer: Any) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer

    @abstractmethod
    def encode(self, text: str, *, specials: bool) -> bytes:
        """Token ids of a text. specials: whether to add the tokens that the tokenizer puts around a
        prompt. Raises UnicodeEncodeError for a text with a lone surrogate.
        """

    def text_of(self, ids: list[int]) -> str:
        """Text of token ids, special tokens included."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def id_bytes(self, token: str) -> bytes:
        """A token's id as 4 bytes, as in encoded text; empty: there is no such token."""
        token_id = self._tokenizer.token_to_id(token)
        return b"" if token_id is None else token_bytes([token_id])


class _FastEncoder(Encoder):
    """Encoder of the package fastokens: 30 times as fast as tokenizers, but not for every file."""

    def __init__(self, content: str, cache_bytes: int) -> None:
        import fastokens

        super().__init__(fastokens.Tokenizer.from_json_str(content))
        if cache_bytes:
            self._tokenizer.enable_segment_cache(cache_bytes)

    @override
    def encode(self, text: str, *, specials: bool) -> bytes:
        ids, _ = self._tokenizer.encode_batch_flat([text], add_special_tokens=specials)
        return bytes(ids)

    @override
    def __repr__(self) -> str:
        return f"<fastokens {self._tokenizer.segment_cache_stats()}>"


class _SlowEncoder(Encoder):
    """Encoder of the package tokenizers: for every file; it releases the GIL."""

    def __init__(self, content: str) -> None:
        import tokenizers

        super().__init__(tokenizers.Tokenizer.from_str(content))

    @override
    def encode(self, text: str, *, specials: bool) -> bytes:
        try:
            (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=specials)
        except TypeError:
            text.encode()  # raises UnicodeEncodeError
            raise
        return token_bytes(encoding.ids)

    @override
    def __repr__(self) -> str:
        return "<tokenizers>"


def token_bytes(ids: list[int]) -> bytes:
    """Ids from 0 to 2^32 - 1 as little-endian 32-bit integers; raises OverflowError beyond."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def load_encoder(folder: TokenizerFolder, cache_bytes: int) -> Encoder:
    """The fastest encoder that accepts the folder's tokenizer.json. Raises PromptError
    (NO_TOKENIZER)."""
    content = _content(folder)
    refusals: list[str] = []
    for package, load in _LOADERS.items():
        try:
            return load(content, cache_bytes)
        except ImportError:
            refusals.append(f"{package} is not installed ({_INSTALL[package]})")
        except Exception as error:  # both packages raise plain ValueError or Exception
            refusals.append(f"{package} refuses the file: {error}")
    raise no_tokenizer(f"{folder.path / 'tokenizer.json'} can't be used: {'; '.join(refusals)}")


_LOADERS: dict[str, Callable[[str, int], Encoder]] = {
    "fastokens": _FastEncoder,
    "tokenizers": lambda content, _: _SlowEncoder(content),
}
_INSTALL = {"fastokens": "pip install 'kvroute[prompts]'", "tokenizers": "pip install tokenizers"}


def _content(folder: TokenizerFolder) -> str:
    file = folder.path / "tokenizer.json"
    try:
        content = str(folder.tokenizer, "utf-8")
    except UnicodeDecodeError as error:
        raise no_tokenizer(f"{file} is not UTF-8") from error
    try:
        return with_added_tokens(content, folder.added_tokens)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        message = f"{file} can't take the tokens of tokenizer_config.json: {error}"
        raise no_tokenizer(message) from error
