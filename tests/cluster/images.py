"""Archives of images, in the format of `docker save`, made without a daemon or a base to pull.

Names such as `kvroute/kvroute:0.1.0` are short ones: whoever reads an archive completes them.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.binaries import BY_NAME
from tests.distribution import image as checkout
from tests.distribution.project import version

PAUSE = "localhost/pause:1"
KVROUTE = f"kvroute/kvroute:{version()}"
VLLM = "vllm/vllm-openai:v0.32.0"
SGLANG = "lmsysorg/sglang:v0.5.23"
PATH = "/opt/kvroute/bin:/usr/local/bin:/usr/bin:/bin"


def pause(archive: Path) -> Path:
    """The image of the process that holds a pod's namespaces."""
    return image(archive, PAUSE, {"pause": BY_NAME["pause"].path}, entrypoint=["/pause"])


def archives(folder: Path) -> list[Path]:
    """kvroute's image of this checkout, and simulated engines under the names of vLLM's and
    SGLang's images, which the tutorials' manifests have. Built once a folder, in minutes."""
    if folder.exists():
        return sorted(folder.glob("*.tar"))
    folder.mkdir()
    checkout.build(KVROUTE, base=checkout.debian_base())
    ours = checkout.save(KVROUTE, folder / "kvroute.tar", layout="docker")
    stand_in = {"opt/standin": Path(__file__).parent / "standin"}
    environment = ("PYTHONPATH=/opt/standin", f"PATH=/opt/standin:{PATH}")
    others = [
        image(folder / f"{number}.tar", name, stand_in, base=ours, environment=environment)
        for number, name in enumerate((VLLM, SGLANG))
    ]
    return [ours, *others]


def image(
    archive: Path,
    name: str,
    files: Mapping[str, Path],
    *,
    entrypoint: Sequence[str] = (),
    base: Path | None = None,
    environment: Sequence[str] = (),
    user: str = "",
) -> Path:
    """An image with one layer, {path in the image: file or folder of this machine}, on an empty
    file system or on the image in the archive `base`."""
    layer = _layer(files)
    digest = hashlib.sha256(layer).hexdigest()
    config: dict[str, Any] = {"architecture": "amd64", "os": "linux"}
    config |= {"config": {}, "rootfs": {"type": "layers", "diff_ids": []}}
    layers: list[str] = []
    with tarfile.open(archive, "w") as made:
        if base is not None:
            with tarfile.open(base) as opened:
                (entry,) = json.load(_file(opened, "manifest.json"))
                config = json.load(_file(opened, entry["Config"]))
                layers = entry["Layers"]
                for each in layers:
                    member = opened.getmember(each)
                    if member.issym():  # a layer that is there twice
                        made.addfile(member)
                    else:
                        made.addfile(member, opened.extractfile(member))
        config["rootfs"]["diff_ids"].append(f"sha256:{digest}")
        config.pop("history", None)  # it would need a line for each layer
        of_process = config.setdefault("config", {})
        of_process |= {"Entrypoint": list(entrypoint), "Cmd": [], "User": user}
        of_process["Env"] = [*(of_process.get("Env") or ()), *environment]
        text = json.dumps(config).encode()
        config_name = f"{hashlib.sha256(text).hexdigest()}.json"
        layer_name = f"{digest}.tar"
        manifest = {"Config": config_name, "RepoTags": [name], "Layers": [*layers, layer_name]}
        _add(made, layer_name, layer)
        _add(made, config_name, text)
        _add(made, "manifest.json", json.dumps([manifest]).encode())
    return archive


def _layer(files: Mapping[str, Path]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as layer:
        for path, file in files.items():
            layer.add(file.resolve(), arcname=path, filter=_roots)
    return buffer.getvalue()


def _roots(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if "__pycache__" in member.name:
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode |= 0o444 | (0o111 if member.isdir() or member.mode & 0o100 else 0)
    return member


def _file(opened: tarfile.TarFile, name: str) -> io.BufferedReader:
    found = opened.extractfile(name)
    if found is None:
        raise ValueError(f"{name} is no file of the archive")
    return io.BufferedReader(found)  # type: ignore[arg-type]


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))
