"""Real processes: simulated engines, and `kvroute serve` in front of them.

Model `m` has two workers, model `full` one with a single slot.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.stage.waiting import free_port

START_S = 90.0
STOP_S = 60.0
TOKENS_MAX = 1 << 22
"""Of a prompt: 16 MiB."""
BOTH_FAMILIES = os.geteuid() == 0
"""Whether `localhost` is made a name of 127.0.0.1 and of ::1 for routers."""
_KVROUTE = (sys.executable, "-m", "router.app.main")
_AGED = """
import sys
from router.api.service import grpc_bounds
grpc_bounds.GRPC_BOUNDS = grpc_bounds.GrpcBounds(age_s=float(sys.argv.pop(1)))
from router.app.main import main
main()
"""
"""The same with another age of connections."""


def _await(condition: Any, what: str, process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + START_S
    while not condition():
        if process.poll() is not None or time.monotonic() > until_s:
            raise AssertionError(f"in vain: {what}; the process has {process.poll()}")
        time.sleep(0.05)


@contextmanager
def _process(*command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    words = list(map(str, command))
    # kvroute takes every variable of this name for a key of its configuration.
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVROUTE_")}
    silent = subprocess.DEVNULL  # what `simulate` prints for its user
    with subprocess.Popen(words, env=env, stdout=silent, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def engines(folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Simulated ones; yields them as `workers` of a router's configuration."""
    options = {"m": ("--engines", "2"), "full": ("--engines", "1")}
    with ExitStack() as stack:
        workers = []
        for model, more in options.items():
            config = folder / f"{model}.yaml"
            # A prompt of 16 MiB has its blocks.
            about = ("--blocks", str(TOKENS_MAX // 16), "--write-config", config)
            command = (*_KVROUTE, "simulate", "--model", model, *more, *about)
            _await(config.exists, "engines", stack.enter_context(_process(*command)))
            for worker in yaml.safe_load(config.read_text())["workers"]:
                worker["id"] = f"{model}-{worker['id']}"
                worker["slots"] = 1 if model == "full" else 100_000
                workers.append(worker)
        yield workers


def _of_hosts(hosts: Path) -> tuple[str, ...]:
    """Runs a command on a host with other names, where this user may make one."""
    if not BOTH_FAMILIES:
        return ()
    bind = f"mount --bind {shlex.quote(str(hosts))} /etc/hosts"
    return ("unshare", "--mount", "sh", "-c", f'{bind} && exec "$@"', "sh")


def _page(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
        return str(answer.read().decode())


@dataclass(frozen=True)
class Router:
    """`kvroute serve`."""

    process: subprocess.Popen[bytes]
    port: int
    metrics_port: int
    probes_port: int

    def metric(self, wanted: str, label: str = "") -> float:
        """The sum of a metric's samples; label: of those that have it alone, as `name="value"`."""
        lines = _page(self.metrics_port, "/metrics").splitlines()
        samples = [line.rpartition(" ") for line in lines]
        values = [
            float(value)
            for name, _, value in samples
            if name.split("{")[0] == wanted and label in name
        ]
        assert values, f"{wanted} {label}"
        return sum(values)

    def _ready(self) -> bool:
        try:
            _page(self.probes_port, "/readyz")
        except OSError:
            return False
        return True


@contextmanager
def router(
    folder: Path, workers: list[dict[str, Any]], age_s: float | None = None, **parts: Any
) -> Iterator[Router]:
    """One that is ready. age_s: of its connections; None: the product's. parts: sections of its
    configuration."""
    port, metrics_port, probes_port = free_port(), free_port(), free_port()
    config: dict[str, Any] = {
        "workers": workers,
        "grpc": {"listen": f"localhost:{port}"},
        "metrics": {"listen": f"127.0.0.1:{metrics_port}"},
        "probes": {"listen": f"127.0.0.1:{probes_port}"},
        "routing": {"prompt_tokens_max": TOKENS_MAX},
        "log": {"level": "error"},
    }
    for section, keys in parts.items():
        config[section] = config.get(section, {}) | keys
    folder.mkdir(exist_ok=True)
    path = folder / "router.yaml"
    path.write_text(yaml.safe_dump(config))
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n::1 localhost\n")
    program = _KVROUTE if age_s is None else (sys.executable, "-c", _AGED, str(age_s))
    with _process(*_of_hosts(hosts), *program, "serve", "--config", path) as process:
        serving = Router(process, port, metrics_port, probes_port)
        _await(serving._ready, "a router that is ready", process)
        yield serving


@dataclass(frozen=True)
class Secured:
    """A router with TLS, and the files that its callers need."""

    router: Router
    ca: str
    certificate: str
    key: str
