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
        self._read.argtypes = (ctypes.c_char_p, ctypes.c_size_t)
        self._read.restype = ctypes.c_int64

    def read(self, content: bytes) -> int:
        """Every reader on the content; the items that are counted in it as a batch, or -1."""
        items: int = self._read(content, len(content))
        return items
