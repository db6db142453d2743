"""What a proxy needs to have one engine hand a KV cache over to another, in the engines' own words.

SGLang: both requests carry the prefill engine's bootstrap server and a room, and go out at once.
vLLM: the prefill request says that somebody else will decode, and its answer says where the blocks
are. With NIXL that answer goes into the decode request as it is; with Mooncake both are told a
transfer_id, and the decode request where the prefill engine is.

Read 2026-11-21: sglang 0.5.23, `sglang.srt.disaggregation`; vllm 0.32, the proxies of its
NixlConnector and MooncakeConnector.
"""

import json
from typing import NamedTuple
from urllib.parse import urlsplit

from events.facts import Heartbeat

SGLANG_PORT = 8998
"""--disaggregation-bootstrap-port, and VLLM_MOONCAKE_BOOTSTRAP_PORT, unless changed."""
MOONCAKE = "MooncakeConnector"


class HandOver(NamedTuple):
    """As in kvroute.v1.PrefillWorker."""

    bootstrap_host: str
    bootstrap_port: int
    prefill_kv_transfer_params: str
    decode_kv_transfer_params: str


def hand_over(prefill: Heartbeat, room: int) -> HandOver:
    """How the worker with that heartbeat hands over. room: which no other request has."""
    host = prefill.bootstrap_host or host_of(prefill.address)
    if prefill.engine == "sglang":
        return HandOver(host, prefill.bootstrap_port or SGLANG_PORT, "", "")
    if prefill.kv_connector == MOONCAKE:
        port = prefill.bootstrap_port or SGLANG_PORT
        transfer = {"transfer_id": f"kvroute-{room:x}"}
        at = f"[{host}]" if ":" in host else host
        decode = transfer | {"remote_bootstrap_addr": f"http://{at}:{port}"}
        if prefill.kv_engine_id:
            decode["remote_engine_id"] = prefill.kv_engine_id
        return HandOver(
            host,
            port,
            _json(do_remote_decode=True, do_remote_prefill=False, **transfer),
            _json(do_remote_decode=False, do_remote_prefill=True, **decode),
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


def host_of(address: str) -> str:
    """The host of host:port or of a URL; empty where there is none."""
    try:
        return urlsplit(address if "://" in address else f"//{address}").hostname or ""
    except ValueError:  # brackets that hold no IPv6 address
        return ""


def _json(**params: object) -> str:
    return json.dumps(params)
