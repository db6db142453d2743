"""Parameters with which a proxy has an engine hand a KV cache over, in the engines' own terms.

At once (SGLang): both requests carry the prefill engine's bootstrap server and a room, a number by
which the two engines meet. In turn (vLLM): the prefill request says that another engine will
decode, and its answer says where the blocks are. With NIXL that answer goes into the decode request
as it is; with Mooncake both requests have a transfer_id, and the decode request the prefill
engine's address.

Sources, read 2026-11-21: sglang 0.5.23, `sglang.srt.disaggregation`; vllm 0.32, the proxies of its
NixlConnector and MooncakeConnector.
"""

import json

from events.engines.bootstrap import BOOTSTRAP_PORT, MOONCAKE, bootstrap_url, host_of
from events.engines.engine import HandOver
from events.engines.table import engine_of
from events.plane.facts import Heartbeat


def is_reachable(prefill: Heartbeat) -> bool:
    """Whether a prefill worker's heartbeat has all that a decode engine needs to fetch from it.

    Without the engine's id MooncakeConnector neither fetches nor fails: the request waits for ever.
    """
    return prefill.kv_connector != MOONCAKE or bool(prefill.kv_engine_id)


def bootstrap_server(prefill: Heartbeat) -> tuple[str, int]:
    """Host and port of the bootstrap server of a prefill worker, as in kvroute.v1.PrefillWorker;
    decode engines connect to it. Port 0: the worker has none.
    """
    at_once = engine_of(prefill.engine).hand_over is HandOver.AT_ONCE
    if not at_once and prefill.kv_connector != MOONCAKE:
        return prefill.bootstrap_host, prefill.bootstrap_port
    host = prefill.bootstrap_host or host_of(prefill.address)
    return host, prefill.bootstrap_port or BOOTSTRAP_PORT


def transfer_params(prefill: Heartbeat, room: int) -> tuple[str, str]:
    """The kv_transfer_params of the prefill request and of the decode request, as in
    kvroute.v1.PrefillWorker; empty: the worker needs none. room: a number that no other request
    has.
    """
    if engine_of(prefill.engine).hand_over is not HandOver.IN_TURN:
        return "", ""
    if prefill.kv_connector != MOONCAKE:
        return _NOBODY_YET, ""
    transfer = f"kvroute-{room:x}"
    return (
        json.dumps({"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}),
        json.dumps(
            {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "transfer_id": transfer,
                "remote_bootstrap_addr": bootstrap_url(*bootstrap_server(prefill)),
                "remote_engine_id": prefill.kv_engine_id,
            }
        ),
    )


_NOBODY_YET = json.dumps(
    {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
    }
)
