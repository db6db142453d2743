"""Calls of Route by h2load, which is C as the other router's wrk is: two servers are compared.

One connection, one call after the other, each with the same prompt.
"""

import struct
import tempfile
from pathlib import Path
from statistics import median

from kvroute.v1 import RouteRequest
from tests.bench.environments import Missing, debian_program
from tests.stage.programs import ran

CALLS = 2000
REPEATS = 5


async def p50_us(target: str, request: RouteRequest) -> float | None:
    """Median time of a call; the median of REPEATS such medians. None: there is no h2load."""
    try:
        h2load = debian_program("h2load", "nghttp2-client")
    except Missing:
        return None
    content = request.SerializeToString()
    with tempfile.TemporaryDirectory() as name:
        body, log = Path(name) / "body", Path(name) / "log"
        body.write_bytes(struct.pack(">BI", 0, len(content)) + content)
        command = [h2load, "-t1", "-c1", "-m1", f"-n{CALLS}", f"-d{body}", f"--log-file={log}"]
        command += ["-Hcontent-type: application/grpc", "-Hte: trailers"]
        command.append(f"http://{target}/kvroute.v1.Router/Route")
        found = []
        for _ in range(REPEATS):
            log.unlink(missing_ok=True)
            if (await ran(*command)).code:
                raise RuntimeError("h2load failed")
            found.append(median(int(line.split("\t")[2]) for line in log.read_text().splitlines()))
    return median(found)
