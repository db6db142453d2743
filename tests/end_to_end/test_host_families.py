"""`kvroute serve` and `kvroute relay` on `[::]`, on hosts of one family or both."""

import platform
import shutil
import subprocess
import sys

import pytest

from tests.end_to_end.host_families import ADDRESSES, LOOPBACK, PORTS
from tests.stage.programs import ran


def why_no_namespace() -> str:
    """Empty: this process may make network namespaces."""
    if not shutil.which("unshare") or not shutil.which("ip"):
        return "needs unshare and ip (util-linux, iproute2)"
    made = (
        "ip link add a0 type veth peer name a1 && test -w /proc/sys/net/ipv6/conf/all/disable_ipv6"
    )
    tried = subprocess.run(["unshare", "-n", "sh", "-c", made], capture_output=True, text=True)
    return f"no network namespace can be made: {tried.stderr.strip()}" if tried.returncode else ""


@pytest.mark.parametrize("host", ["kernel", "ipv4", "ipv6", "both"])
async def test_every_port_serves_every_address_of_its_host(host: str) -> None:
    command = [sys.executable, "-m", "tests.end_to_end.host_families", host]
    if host == "kernel":
        if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
            pytest.skip("the filter on socket(2) is written for Linux on x86_64 and aarch64")
    elif why_not := why_no_namespace():
        pytest.skip(why_not)
    else:
        command = ["unshare", "-n", *command]
    code, output, err = await ran(*command)
    assert code == 0, output + err
    addresses = [*LOOPBACK[host], *ADDRESSES.get(host, [])]
    assert output.count(": served") == len(PORTS) * len(addresses)
