"""A machine of the cluster: namespaces of its own for network, mounts and processes.

A node is a process that does nothing (sources/pause.go), as PID 1 of a PID namespace. Every program
of the node, each pod among them, is in that namespace: they end with PID 1, which ends with the
process that made it. The machine keeps no file, no mount, no address and no kernel setting of a
node; cgroups are removed by `end`.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from tests.cluster.binaries import BY_NAME

T = TypeVar("T")
CGROUPS = Path("/sys/fs/cgroup")
SHARES = 16384
"""Weight of a node's pods, as of 16 cores, so that they run beside other work of the machine."""

# In the node's mount namespace alone: what CNI and containerd keep, and the files by which the
# kubelet would change the settings of the whole machine, and counts its cores.
_PREPARE = """
set -e
for folder in /run/netns /run/containerd /var/lib/cni; do
    mkdir -p $folder; mount -t tmpfs tmpfs $folder
done
mkdir /run/netns/settings
for setting in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops; do
    file=/run/netns/settings/$(basename $setting)
    cat /proc/sys/$setting > $file; mount --bind $file /proc/sys/$setting
done
ip link set lo up
sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 net.ipv6.conf.default.accept_dad=0
"""


# What containerd, CNI and kube-proxy do on a node, and a container without rights may not.
_TRY = """
set -e
cd "$0"; mkdir lower upper work merged
mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work merged
ip link add kv-probe type veth peer name kv-eborp
for tool in iptables ip6tables; do $tool -w -t nat -L -n > /dev/null; done
"""


def refusal() -> str:
    """Why this machine lets nobody make a node here; empty: it does."""
    with TemporaryDirectory(prefix="kvroute-probe-") as folder:
        node = None
        try:
            node = Node.make("probe", Path(folder))
            node.run("sh", "-c", _TRY, folder)
        except (OSError, RuntimeError, AssertionError, subprocess.TimeoutExpired) as error:
            return f"rights on this machine ({str(error).strip().splitlines()[-1][:200]})"
        finally:
            if node is not None:
                node.end()
    return ""


class Node:
    """A machine named `name`; the logs of its programs are in `folder`/log."""

    def __init__(self, name: str, folder: Path, pid: int) -> None:
        """The node whose PID 1 is `pid` of this machine."""
        self.name, self.folder, self.pid = name, folder, pid
        self.cgroup = f"kvroute-{pid}"
        self._holder: subprocess.Popen[bytes] | None = None
        self._started: list[subprocess.Popen[bytes]] = []

    @classmethod
    def make(cls, name: str, folder: Path) -> "Node":
        """A new node, which ends with this process at the latest."""
        (folder / "log").mkdir(parents=True, exist_ok=True)
        holder = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL"),
                *("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child"),
                *("--mount-proc", "--propagation", "slave"),
                str(BY_NAME["pause"].path),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # unshare complains when its child is killed
        )
        (pid,) = until(lambda: children(holder.pid), 30, "a node's first process")
        node = cls(name, folder, pid)
        node._holder = holder
        for hierarchy in _hierarchies():
            (hierarchy / node.cgroup).mkdir()
            if hierarchy.name == "cpuset":
                for file in ("cpuset.cpus", "cpuset.mems"):
                    (hierarchy / node.cgroup / file).write_text((hierarchy / file).read_text())
            if (shares := hierarchy / node.cgroup / "cpu.shares").exists():
                shares.write_text(str(SHARES))
        node.run("sh", "-c", _PREPARE)
        return node

    def run(
        self,
        *command: str,
        environment: Mapping[str, str] | None = None,
        timeout: float = 60,
    ) -> str:
        """The output of a command in all of the node's namespaces; raises where it fails."""
        ran = subprocess.run(
            [*self._enter("--mount", "--pid"), *command],
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if ran.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(command)[:200]}: {ran.stderr[-2000:]}")
        return ran.stdout

    def start(self, name: str, *command: str, environment: Mapping[str, str] | None = None) -> None:
        """Starts a program of the node; its output goes to log/NAME.log."""
        with (self.folder / "log" / f"{name}.log").open("ab") as log:
            started = subprocess.Popen(
                [*self._enter("--mount", "--pid"), *command],
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started.append(started)
        (self.folder / f"{name}.pid").write_text(str(started.pid))

    def stop(self, name: str, ended_by: signal.Signals = signal.SIGTERM) -> None:
        """Ends a program of the node and waits for its end."""
        # What was started is nsenter, which waits for its child in the namespace.
        entered = int((self.folder / f"{name}.pid").read_text())
        for pid in children(entered):
            os.kill(pid, ended_by)
        until(lambda: not children(entered), 120, f"the end of {name}")

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` in the node's network, with this machine's files."""
        return [*self._enter(), *command]

    def end(self) -> None:
        """Ends all processes of the node at once, as a machine does that loses its power."""
        os.kill(self.pid, signal.SIGKILL)
        if self._holder is not None:
            self._holder.wait(timeout=60)
        for started in self._started:
            started.wait(timeout=60)
        for hierarchy in _hierarchies():
            until(partial(_removed, hierarchy / self.cgroup), 60, f"the end of {self.cgroup}")

    def _enter(self, *more: str) -> list[str]:
        return ["nsenter", "--target", str(self.pid), "--net", *more, "--"]


def _hierarchies() -> list[Path]:
    """Mounted hierarchies of cgroup v1, or the one of v2."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return [path for path in CGROUPS.iterdir() if (path / "cgroup.procs").exists()]


def children(pid: int) -> list[int]:
    """Process ids of the children of a process."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


def until(found: Callable[[], T], timeout_s: float, what: str, every_s: float = 0.2) -> T:
    """The first true result of `found`, asked again and again."""
    deadline = time.monotonic() + timeout_s
    while True:
        if result := found():
            return result
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not after {timeout_s:g} s")
        time.sleep(every_s)


def _removed(top: Path) -> bool:
    if not top.exists():
        return True
    for folder, _, _ in os.walk(top, topdown=False):
        try:
            Path(folder).rmdir()
        except OSError:
            return False
    return True
