"""Generates kvroute.v1 from the .proto files; with --check, lints them and compares instead.

protoc comes with grpcio-tools and lint with buf-bin, so nothing is fetched. buf reads the
descriptor set that protoc wrote, since google/rpc/status.proto lives in a Python package.
"""

import filecmp
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).parent
PROTOS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("kvroute/v1/*.proto"))


def protoc(*outputs: str) -> None:
    """Runs protoc over all .proto files; raises CalledProcessError with its message printed."""
    includes = [
        f"-I{ROOT}",
        f"-I{files('grpc_tools') / '_proto'}",
        f"-I{Path(str(files('google.rpc') / 'status.proto')).parents[2]}",
    ]
    command = [sys.executable, "-m", "grpc_tools.protoc", *includes, *outputs, *PROTOS]
    subprocess.run(command, check=True, cwd=ROOT)


def generate(target: Path) -> None:
    protoc(
        f"--python_out={target}",
        f"--grpc_python_out={target}",
        f"--mypy_out=quiet:{target}",
        f"--mypy_grpc_out=quiet:{target}",
    )


def check() -> int:
    """0 when buf reports nothing and the generated code matches the .proto files."""
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "kvroute.binpb"
        protoc(f"--descriptor_set_out={image}", "--include_imports", "--include_source_info")
        lint = ["buf", "lint", str(image), "--config", str(ROOT / "buf.yaml")]
        if subprocess.run(lint, check=False).returncode:
            return 1
        generate(Path(folder))
        fresh = sorted(Path(folder).glob("kvroute/v1/*"))
        stale = [
            path.name
            for path in fresh
            if not filecmp.cmp(path, ROOT / "kvroute" / "v1" / path.name, shallow=False)
        ]
    if stale:
        sys.stderr.write(f"generated code is not fresh, run `make proto`: {', '.join(stale)}\n")
        return 1
    return 0


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(check())
    generate(ROOT)
