"""What a command sets for its process before it runs."""

import ctypes
import subprocess
import sys

import msgspec
import pytest

BURST = """
import ctypes, json
from router.app.cli.run import settle

class Info(ctypes.Structure):  # glibc's mallinfo2
    _fields_ = [(name, ctypes.c_size_t) for name in "abcdefghij"]

settle()
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
mapped = lambda: libc.mallinfo2().e
before = mapped()
libc.free(libc.malloc(16 << 20))  # by default the bound grows with it
burst = []
for size in (4 << 20, 5 << 20, 6 << 20) * 20:
    burst.append(libc.malloc(size))
    libc.malloc(100)  # stays, and would keep the heap before it
under = mapped()
for block in burst:
    libc.free(block)
print(json.dumps([before, under, mapped()]))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="is for glibc")
def test_long_buffers_of_a_burst_go_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", BURST], check=True, capture_output=True)
    before, under, after = msgspec.json.decode(done.stdout)
    assert under - before >= 20 * 15 * (1 << 20)
    assert after == before
