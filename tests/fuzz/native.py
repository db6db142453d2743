"""The native readers in a library of their own, on buffers that end where the message ends."""

import ctypes
import os
import shlex
import subprocess
import sysconfig
import tempfile
from pathlib import Path

HOUSE = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("native.c")
NAMES = [
    *("plain", "request_id", "model", "session_id", "tokens", "hashes", "block_size"),
    *("prompt_tokens", "output_tokens", "priority", "omit_receipt", "items"),
]


class Seen(ctypes.Structure):
    """As in native.c."""

    _fields_ = [(name, ctypes.c_int64) for name in NAMES]

    plain: int
    items: int


class NativeReaders:
    """native.c, compiled with CFLAGS of the environment, which may name sanitizers."""

    def __init__(self) -> None:
        compiler = shlex.split(sysconfig.get_config_var("CC"))[0]
        flags = shlex.split(os.environ.get("CFLAGS", "-O1"))
        environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "readers.so"
            subprocess.run(
                [compiler, *flags, "-shared", "-fPIC", f"-I{HOUSE}", SOURCE, "-o", library],
                check=True,
                env=environment,
            )
            self._read = ctypes.CDLL(str(library)).read_all
        self._read.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.POINTER(Seen))
        self._read.restype = None

    def read(self, content: bytes) -> Seen:
        """Every reader on the content; what the fast path's reader sees."""
        seen = Seen()
        self._read(content, len(content), ctypes.byref(seen))
        return seen
