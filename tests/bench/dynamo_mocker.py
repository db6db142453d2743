"""Records what Dynamo's offline simulator makes of a trace, for
simulator/engines/profiles/mocker.yaml.

    python -m tests.bench.dynamo_mocker CONVERSATION_TRACE

The trace is Mooncake's conversation trace (simulator/traffic/data/README.md tells where it is);
the slice of it that ships is replayed too, on one worker. Writes
tests/simulator/data/dynamo_mocker.json, which tests hold our simulator against. Takes two or three
minutes.
"""

import json
import sys

from simulator.traffic.trace_file import SLICES
from tests.bench.environments import BUILD, DYNAMO, python_of, run

RECORD = BUILD.parent / "tests" / "simulator" / "data" / "dynamo_mocker.json"


def main(trace: str) -> None:
    side = RECORD.parents[2] / "bench" / "dynamo_mocker_side.py"
    found = json.loads(run(str(python_of(*DYNAMO)), str(side), trace, str(SLICES["conversation"])))
    found = {
        "command": "python -m tests.bench.dynamo_mocker mooncake_conversation_trace.jsonl",
        "dynamo": DYNAMO[1],
    } | found
    lines = json.dumps(found, separators=(",", ":")).replace('},{"', '},\n{"')
    RECORD.write_text(lines.replace('],"', '],\n"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
