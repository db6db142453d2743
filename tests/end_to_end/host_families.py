"""Starts `kvroute serve` and `kvroute relay` with every port on `[::]`, and connects to each.

    unshare -n .venv/bin/python -m tests.end_to_end.host_families HOST

HOST is what the host has: `ipv4` (IPv6 is switched off by sysctl), `ipv6` (no IPv4 address but
127.0.0.1's), `both`: these change the network namespace that they are started in; `kernel` is a
host whose kernel knows no IPv6 (as with ipv6.disable=1), by a filter on socket(2), and needs no
namespace. Prints a line for each port and address; exit code 1 if one is not served.
"""

import ctypes
import errno
import os
import platform
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from router.net.http2.frames import PREFACE, SETTINGS, frame
from tests.stage.waiting import free_port

PORTS = ("grpc", "picker", "gateway", "metrics", "probes", "relay")
HTTP = ("gateway", "metrics", "probes", "relay")
ADDRESSES = {"ipv4": ["10.9.9.1"], "ipv6": ["fd09::1"], "both": ["10.9.9.1", "fd09::1"]}
LOOPBACK = {
    "ipv4": ["127.0.0.1"],
    "ipv6": ["127.0.0.1", "::1"],
    "both": ["127.0.0.1", "::1"],
    "kernel": ["127.0.0.1"],
}
START_S = 60.0
_COMMAND = [sys.executable, "-m", "router.app.main"]


def set_up(host: str) -> list[str]:
    """Makes this network namespace, or this process, such a host; its addresses."""
    if host == "kernel":
        refuse_ipv6()
        return LOOPBACK[host]
    ip("link", "set", "lo", "up")
    ip("link", "add", "pod0", "type", "veth", "peer", "name", "pod1")
    if host == "ipv4":
        for name in ("all", "default"):
            Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")
    for link in ("pod0", "pod1"):
        ip("link", "set", link, "up")
    for address in ADDRESSES[host]:
        about = ["nodad"] if ":" in address else []
        ip("address", "add", address + ("/64" if about else "/24"), "dev", "pod0", *about)
    return [*LOOPBACK[host], *ADDRESSES[host]]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def refuse_ipv6() -> None:
    """Has socket(2) fail for AF_INET6, in this process and its children (seccomp(2), mode 2)."""
    number = {"x86_64": 41, "aarch64": 198}[platform.machine()]
    load, equal, give = 0x20, 0x15, 0x06
    program = [
        (load, 0, 0, 0),  # the number of the call
        (equal, 0, 3, number),
        (load, 0, 0, 16),  # its first argument
        (equal, 0, 1, socket.AF_INET6),
        (give, 0, 0, 0x00050000 | errno.EAFNOSUPPORT),
        (give, 0, 0, 0x7FFF0000),
    ]
    code = b"".join(struct.pack("HBBI", *each) for each in program)
    held = ctypes.create_string_buffer(code)
    about = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)
    pr_set_no_new_privs, pr_set_seccomp, filters = 38, 22, 2
    for words in ((pr_set_no_new_privs, 1, 0, 0, 0), (pr_set_seccomp, filters, about)):
        if libc.prctl(*words) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


def started(folder: Path, ports: dict[str, int]) -> list[subprocess.Popen[bytes]]:
    """The router and the relay."""
    listen = {name: f"'[::]:{port}'" for name, port in ports.items()}
    (folder / "serve.yaml").write_text(f"""
grpc: {{listen: {listen["grpc"]}, any_address: true}}
picker: {{listen: {listen["picker"]}}}
gateway: {{listen: {listen["gateway"]}, any_address: true}}
metrics: {{listen: {listen["metrics"]}}}
probes: {{listen: {listen["probes"]}}}
""")
    relay = ["relay", "--worker-id", "w", "--address", "http://127.0.0.1:1"]
    relay += ["--nats", "nats://127.0.0.1:1", "--metrics-listen", f"[::]:{ports['relay']}"]
    commands = [["serve", "--config", str(folder / "serve.yaml")], relay]
    return [
        subprocess.Popen([*_COMMAND, *words], stderr=(folder / words[0]).open("wb"))
        for words in commands
    ]


def is_served(name: str, address: str, port: int) -> bool:
    """Whether a client is, over this address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sent = PREFACE + frame(SETTINGS, 0, 0)
    if name in HTTP:
        path = {"gateway": "/health", "probes": "/livez"}.get(name, "/metrics")
        sent = f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode()
    try:
        with socket.socket(family, socket.SOCK_STREAM) as client:
            client.settimeout(START_S)
            client.connect((address, port))
            client.sendall(sent)
            answer = client.recv(100)
    except OSError:
        return False
    return answer.startswith(b"HTTP/1.1 200") if name in HTTP else answer[3:4] == b"\x04"


def main(host: str) -> int:
    addresses = set_up(host)
    ports = {name: free_port() for name in PORTS}
    lost, say = 0, sys.stdout.write
    with tempfile.TemporaryDirectory() as folder:
        processes = started(Path(folder), ports)
        try:
            until_s = time.monotonic() + START_S
            for name, port in ports.items():
                for address in addresses:
                    while not (served := is_served(name, address, port)):
                        if time.monotonic() > until_s or any(
                            p.poll() is not None for p in processes
                        ):
                            break
                        time.sleep(0.2)
                    lost += not served
                    say(f"{host}: {name} over {address}: {'served' if served else 'NOT SERVED'}\n")
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if lost:
            for log in ("serve", "relay"):
                say(f"--- {log}\n{(Path(folder) / log).read_text()[-2000:]}\n")
    return 1 if lost else 0


if __name__ == "__main__":
    if os.getuid() != 0 and sys.argv[1] != "kernel":
        sys.exit("needs the right to change its network namespace")
    sys.exit(main(sys.argv[1]))
