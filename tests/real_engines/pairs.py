"""Fleets of two workers that hand a KV cache over, by what carries it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.real_engines.engines import Engine
from tests.real_engines.stage import Ground
from tests.stage.waiting import free_port

LEASE_S = 20
"""How long a prefill worker holds what nobody fetches (30 s, and 480 of Mooncake, by default)."""
HOST = "127.0.0.1"
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
BLOCKS = {"prefill": 96, "decode": 384}
"""The prefill worker evicts; the decode worker has room for what is computed there to compare."""
CHATS = ("--chat-template", "{{ messages[0]['content'] }}")
"""The tiny model has none."""


def nixl(ground: Ground) -> list[Engine]:
    """vLLM, NixlConnector over UCX: the decode worker reads what the prefill worker answered."""

    def one(role: str) -> Engine:
        config = {
            "kv_connector": "NixlConnector",
            "kv_role": KV_ROLES[role],
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
        }
        return ground.vllm(
            role,
            blocks=BLOCKS[role],
            flags=("--kv-transfer-config", json.dumps(config), *CHATS),
            variables={
                "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                "UCX_NET_DEVICES": "lo",
            },
            told=("--role", role, "--kv-connector", "NixlConnector"),
        )

    return [one("prefill"), one("decode")]


def mooncake(ground: Ground) -> list[Engine]:
    """vLLM, MooncakeConnector over TCP: both are told a transfer, and the prefill worker writes."""

    def one(role: str) -> Engine:
        port = str(free_port())
        config = {
            "kv_connector": "MooncakeConnector",
            "kv_role": KV_ROLES[role],
            "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
        }
        return ground.vllm(
            role,
            blocks=BLOCKS[role],
            flags=("--kv-transfer-config", json.dumps(config), *CHATS),
            variables={
                "VLLM_MOONCAKE_BOOTSTRAP_PORT": port,
                "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(LEASE_S),
                "NO_ACCELERATOR": "1",
                **_mooncake_libraries(ground.build),
            },
            told=("--role", role, "--kv-connector", "MooncakeConnector", "--bootstrap-port", port),
        )

    return [one("prefill"), one("decode")]


def sglang(ground: Ground) -> list[Engine]:
    """SGLang over Mooncake's TCP, and one that serves whole requests: its decode workers can't."""
    port = str(free_port())
    variables = {
        "MOONCAKE_PROTOCOL": "tcp",
        "SGLANG_HOST_IP": HOST,
        **_mooncake_libraries(ground.build),
    }

    def one(role: str, *more: str) -> Engine:
        flags = (
            *("--disaggregation-mode", role, "--disaggregation-transfer-backend", "mooncake"),
            *("--disaggregation-bootstrap-port", port, *more),
        )
        return ground.sglang(role, blocks=192, flags=flags, variables=variables)

    return [
        one("prefill"),
        # Its other way to keep a request that had to make room registers memory with CUDA.
        one("decode", "--disaggregation-decode-retraction-backup", "cpu_tensor"),
        ground.sglang("alone", blocks=192),
    ]


def _mooncake_libraries(build: Path) -> Mapping[str, str]:
    """Mooncake's library wants libibverbs, which NIXL's wheel has."""
    folders = build / "lib", build / "lib/nixl"
    return {"LD_LIBRARY_PATH": ":".join(map(str, folders))}


KINDS: dict[str, Callable[[Ground], list[Engine]]] = {
    "nixl": nixl,
    "mooncake": mooncake,
    "sglang": sglang,
}
