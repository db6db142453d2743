"""What it takes to look into a difference: the request, the decision, the engine's last events."""

import asyncio
import json

import msgspec
import zmq
import zmq.asyncio
from google.protobuf.json_format import MessageToDict

from events.engines.zmq_framing import ReplayEnd, ReplayPart, parse_replay, replay_request
from kvroute.client import Pick
from tests.real_engines.engines import Engine
from tests.real_engines.stage import Stage
from tests.real_engines.verdicts import Sample

BATCHES = 200


async def dump(stage: Stage, engine: Engine, sample: Sample, pick: Pick, number: int) -> None:
    """Writes logs/difference-NUMBER.json."""
    told = {
        "sample": msgspec.to_builtins(sample),
        "receipt": MessageToDict(pick.receipt),
        "workers": [MessageToDict(one) for one in await stage.workers()],
        "samples_before": number,
        "events": await _last_events(engine.replay_of(sample.worker[1])),
    }
    file = engine.logs / f"difference-{number}.json"
    file.write_text(json.dumps(told, indent=1, default=str))


async def _last_events(endpoint: str) -> list[object]:
    """The last batches that the engine published, as it wrote them."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVHWM, 0)
    batches: list[object] = []
    try:
        socket.connect(endpoint)
        await socket.send_multipart(replay_request(0))
        async with asyncio.timeout(5):
            while True:
                match parse_replay(await socket.recv_multipart()):
                    case ReplayPart(sequence, payload):
                        batches.append([sequence, msgspec.msgpack.decode(payload)])
                    case ReplayEnd():
                        break
                    case _:
                        pass
    except TimeoutError:
        batches.append("the replay socket fell silent")
    finally:
        socket.close(0)
        context.destroy(linger=0)
    return batches[-BATCHES:]
