"""The router of a rendered release in a container on this machine, as a kubelet would run it, and a
chat through its gateway.

What differs from a pod: the network is this machine's, so that addresses of all interfaces become
loopback; files of Secrets can be read by all; nothing restarts it.
"""

import base64
import json
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.helm.rendered import Object, Rendered
from tests.stage.waiting import free_port

PATIENCE_S = 600.0
"""For a busy machine; then the process is killed, and the test fails."""
PROGRAM = Path(sys.executable).with_name("kvroute")
READY = "ready: "
"""The router logs it once it may pick every worker."""


@dataclass
class Running:
    """A process, and the lines that it wrote until it was up, and later until its end."""

    process: subprocess.Popen[str]
    lines: list[str]

    def finish(self) -> int:
        """SIGTERM; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait()


@contextmanager
def running(command: Sequence[str | Path], up: str) -> Iterator[Running]:
    """A process that wrote a line with `up`; killed at the end. Fails if it left before."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        late = threading.Timer(PATIENCE_S, process.kill)
        late.start()
        assert process.stdout is not None
        lines: list[str] = []
        try:
            for line in process.stdout:
                lines.append(line)
                if up in line:
                    break
            else:
                raise AssertionError(f"{command} left or hung:\n{''.join(lines)}")
            rest = threading.Thread(target=lines.extend, args=(process.stdout,))
            rest.start()
            try:
                yield Running(process, lines)
            finally:
                process.terminate()  # which docker and podman pass on to the container
                rest.join()
        finally:
            late.cancel()
            process.kill()


@contextmanager
def engines(folder: Path, program: Path = PROGRAM) -> Iterator[list[Object]]:
    """Two simulated engines, by an installed kvroute: the `workers` of a configuration."""
    file = folder / "engines.yaml"
    command = [program, "simulate", "--engines", "2", "--write-config", file]
    with running(command, "kvroute serve --config"):
        yield yaml.safe_load(file.read_text(encoding="utf-8"))["workers"]


def values(workers: Sequence[Object]) -> dict[str, Any]:
    """Of the chart: a router with gateway and probes, keys and TLS, on free ports."""
    listen = {
        name: {"listen": f"[::]:{free_port()}"} for name in ("grpc", "metrics", "probes", "gateway")
    }
    return {"config": {"workers": list(workers), **listen}}


def runner(tool: str) -> list[str]:
    """The words of docker or podman that begin a container, which ends with its process."""
    runtime = ["--runtime=runc"] if tool == "podman" and shutil.which("runc") else []
    # Raising limits takes a right that root of a container or VM may lack.
    limits = ["--ulimit=nofile=1024:4096", "--ulimit=nproc=4096:4096"]
    return [tool, *runtime, "run", "--rm", "--network=host", *limits]


def command(runner: Sequence[str], rendered: Rendered, folder: Path) -> list[str]:
    """The router's container, with all that its pod says.

    folder: for the files of its ConfigMaps and Secrets. Raises ValueError for what no option here
    stands for.
    """
    pod, container = rendered.pod["spec"], rendered.router
    flags = ["--read-only-tmpfs=false"] if runner[0] == "podman" else []
    for key, value in sorted((pod["securityContext"] | container["securityContext"]).items()):
        match key, value:
            case "readOnlyRootFilesystem", True:
                flags.append("--read-only")
            case "allowPrivilegeEscalation", False:
                flags.append("--security-opt=no-new-privileges")
            case "capabilities", {"drop": ["ALL"]}:
                flags.append("--cap-drop=ALL")
            case "runAsUser", int(user):
                flags.append(f"--user={user}:{pod['securityContext']['runAsGroup']}")
            case "fsGroup" | "runAsGroup", int():
                pass
            case "runAsNonRoot", True:
                pass
            case "seccompProfile", {"type": "RuntimeDefault"}:
                pass
            case _:
                raise ValueError(f"securityContext has {key}: {value}")
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for mount in container["volumeMounts"]:
        volume = volumes[mount["name"]]
        if "emptyDir" in volume:
            flags.append(f"--tmpfs={mount['mountPath']}")
        else:
            files = _files(rendered, volume, folder / mount["name"])
            flags.append(f"--volume={files}:{mount['mountPath']}:ro")
    flags += [f"--env={one['name']}={one['value']}" for one in container.get("env", ())]
    flags.append(f"--name={folder.name}")
    return [*runner, *flags, container["image"], *container["args"]]


def status(name: str, tool: str) -> dict[str, str]:
    """What the kernel says of a container's process: /proc/PID/status, and `root`: ro or rw."""
    asked = (tool, "inspect", "--type=container", "--format={{.State.Pid}}", name)
    process = Path("/proc", subprocess.check_output(asked, text=True).strip())
    pairs = (line.partition(":") for line in (process / "status").read_text().splitlines())
    mounts = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
    (root,) = [mount[5].split(",")[0] for mount in mounts if mount[4] == "/"]
    return {key: value.strip() for key, _, value in pairs} | {"root": root}


def _files(rendered: Rendered, volume: Object, folder: Path) -> Path:
    """The files of a ConfigMap or Secret of the release, as a volume has them."""
    source = volume.get("configMap") or volume["secret"]
    name = source.get("name") or source["secretName"]
    (held,) = [
        each
        for each in rendered.by_template.values()
        if each["kind"] in ("ConfigMap", "Secret") and each["metadata"]["name"] == name
    ]
    data = held["data"]
    if held["kind"] == "Secret":
        data = {key: base64.b64decode(value).decode() for key, value in data.items()}
    folder.mkdir(parents=True)
    for item in source.get("items") or [{"key": key, "path": key} for key in data]:
        text = data[item["key"]].replace("[::]:", "127.0.0.1:")
        (folder / item["path"]).write_text(text, encoding="utf-8")
    folder.chmod(0o755)
    return folder


def chat(rendered: Rendered, model: str = "stand-in") -> Object:
    """The answer of the release's gateway to a chat, with the token and the CA of its Secrets."""

    def secret(template: str, key: str) -> str:
        return base64.b64decode(rendered[template]["data"][key]).decode()

    port = yaml.safe_load(rendered.config_text)["gateway"]["listen"].rpartition(":")[2]
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    request = urllib.request.Request(
        f"https://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {secret('keys-secret.yaml', 'token')}",
        },
    )
    trusted = ssl.create_default_context(cadata=secret("tls-secret.yaml", "ca.crt"))
    trusted.check_hostname = False  # it is the Service's
    with urllib.request.urlopen(request, context=trusted, timeout=PATIENCE_S) as answer:
        return json.load(answer)
