"""Parameters with which a proxy has an engine hand a KV cache over, in the engines' own terms.

SGLang: both requests carry the prefill engine's bootstrap server and a room, and go out at once.
vLLM: the prefill request says that another engine will decode, and its answer says where the
blocks are. With NIXL that answer goes into the decode request as it is; with Mooncake both requests
have a transfer_id, and the decode request the prefill engine's address.

Read 2026-11-21: sglang 0.5.23, `sglang.srt.disaggregation`; vllm 0.32, the proxies of its
NixlConnector and MooncakeConnector.
"""

import json
from typing import NamedTuple

from events.engines.bootstrap import BOOTSTRAP_PORT, MOONCAKE, bootstrap_url, host_of
from events.plane.facts import Heartbeat


class HandOver(NamedTuple):
    """As in kvroute.v1.PrefillWorker."""

    bootstrap_host: str
    bootstrap_port: int
    prefill_kv_transfer_params: str
    decode_kv_transfer_params: str


def is_reachable(prefill: Heartbeat) -> bool:
    """Whether the heartbeat has all that a decode engine needs to fetch from this engine.

    Without the engine's id MooncakeConnector neither fetches nor fails: the request waits for ever.
    """
    return prefill.kv_connector != MOONCAKE or bool(prefill.kv_engine_id)


def hand_over(prefill: Heartbeat, room: int) -> HandOver:
    """How the worker with that heartbeat hands over. room: of no other request."""
    host = prefill.bootstrap_host or host_of(prefill.address)
    if prefill.engine == "sglang":
        return HandOver(host, prefill.bootstrap_port or BOOTSTRAP_PORT, "", "")
    if prefill.kv_connector == MOONCAKE:
        port = prefill.bootstrap_port or BOOTSTRAP_PORT
        transfer = f"kvroute-{room:x}"
        return HandOver(
            host,
            port,
            _json(do_remote_decode=True, do_remote_prefill=False, transfer_id=transfer),
            _json(
                do_remote_decode=False,
                do_remote_prefill=True,
                transfer_id=transfer,
                remote_bootstrap_addr=bootstrap_url(host, port),
                remote_engine_id=prefill.kv_engine_id,
            ),
        )
    nobody_yet = dict.fromkeys(
        ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
    )
    return HandOver(
        prefill.bootstrap_host,
        prefill.bootstrap_port,
        _json(do_remote_decode=True, do_remote_prefill=False, **nobody_yet),
        "",
    )


def _json(**params: object) -> str:
    return json.dumps(params)
