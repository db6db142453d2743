"""The programs of a cluster, and what is run on one.

    python -m tests.cluster build [dry]
    python -m tests.cluster missing
    python -m tests.cluster test [ARGUMENT ...]
    python -m tests.cluster shell [COMMAND ...]

`missing` prints what `build` has yet to make, and what this machine lacks or forbids. `test` starts
a cluster and runs pytest on it. `shell` starts one and runs a command in its network, by default
${SHELL}, with kubectl, helm (3) and helm4 on PATH. The cluster ends with what it was started for.
"""

import os
import signal
import subprocess
import sys

from tests.cluster import binaries
from tests.cluster.cluster import Cluster
from tests.cluster.images import archives
from tests.cluster.node import refusal

EVERYTHING = (*binaries.ALL, *binaries.RESOURCES)


def main(verb: str = "", *arguments: str) -> int:
    if verb == "build":
        binaries.build(binaries.API if arguments == ("dry",) else binaries.ALL)
        binaries.fetch()
        return 0
    if verb == "missing":
        names = binaries.missing(EVERYTHING)
        sys.stdout.writelines(f"{name}\n" for name in names or filter(None, [refusal()]))
        return 0
    if verb not in ("test", "shell"):
        sys.stderr.write(__doc__ or "")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster is taken down
    with Cluster() as cluster:
        cluster.load(*archives(cluster.archives))
        environment = {**cluster.environment(), "KVROUTE_CLUSTER": str(cluster.folder)}
        if verb == "test":
            command = [sys.executable, "-m", "pytest", *arguments]
        else:
            sys.stdout.write(f"KVROUTE_CLUSTER={cluster.folder}\n")
            sys.stdout.flush()
            command = cluster.nodes[0].inside(arguments or (os.environ.get("SHELL", "sh"),))
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
