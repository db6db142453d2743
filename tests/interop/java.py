"""Java's programs: libraries by Maven, kept by the content of pom.xml; our own source compiled."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from tests.cluster.binaries import cache

HERE = Path(__file__).parent / "clients" / "java"
INTEROP = "io.grpc.testing.integration.TestServiceClient"


def libraries() -> Path:
    """The folder of all jars that pom.xml asks for."""
    digest = hashlib.sha256((HERE / "pom.xml").read_bytes()).hexdigest()[:12]
    return cache() / "java" / digest


def command(main: str, *before: Path) -> tuple[str, ...]:
    """Runs a class. before: folders of classes in front of the libraries."""
    path = ":".join([*map(str, before), f"{libraries()}/*"])
    # The first compiler alone: these programs live for seconds.
    return ("java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", path, main)


def fetch() -> None:
    """Has Maven fetch what is missing: 140 jars, half a minute."""
    kept = libraries()
    if kept.exists():
        return
    half = kept.with_suffix(".half")
    shutil.rmtree(half, ignore_errors=True)
    run = ["mvn", "-q", "-B", "-f", str(HERE / "pom.xml"), "dependency:copy-dependencies"]
    run += [f"-DoutputDirectory={half}", "-DincludeScope=runtime"]
    subprocess.run(run, check=True, stdout=sys.stderr)
    half.rename(kept)
