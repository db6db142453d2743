"""Prompts that the client hashes: what goes out, and that a router comes to the same."""

from typing import Any

import numpy as np
import pytest

from indexer.hashing import block_hashes, pack_tokens, prefix_hashes
from kvroute.client import InvalidRequest, KvRouteClient
from kvroute.client.messages.hashes import block_hashes_of
from kvroute.client.messages.options import RouteOptions
from kvroute.client.messages.prompt_hashing import MODELS_MAX, PromptHashing, xxhash_hashing
from kvroute.v1 import BlockHashes, Phase
from router.config.settings.routing_settings import GuardSettings, HotPrefixSettings
from tests.kvroute.scripted_router import Server, pick_of
from tests.stage.served import Served, served

TOKENS = list(range(40))
HASHES = block_hashes(pack_tokens(TOKENS), 16)


def client_of(stage: Served, **settings: Any) -> KvRouteClient:
    return KvRouteClient(f"127.0.0.1:{stage.server.port}", hash_prompts=True, **settings)


async def test_tokens_go_first_and_hashes_when_an_answer_has_said_so(server: Server) -> None:
    server.router.answer = pick_of(hash_block_size=16)
    async with KvRouteClient(server.address, hash_prompts=True, fast_lane=False) as client:
        await client.route(token_ids=TOKENS)
        await client.route(token_ids=TOKENS, priority=3)
        async with client.request(token_ids=pack_tokens(TOKENS)):
            pass
    first, *others = server.router.asked
    assert first.token_bytes == pack_tokens(TOKENS)
    hashed = BlockHashes(hashes=HASHES.tolist(), block_size=16, prompt_tokens=40)
    assert [one.block_hashes for one in others] == [hashed, hashed]
    assert others[0].priority == 3


async def test_without_being_asked_to_it_hashes_nothing(server: Server) -> None:
    server.router.answer = pick_of(hash_block_size=16)
    async with KvRouteClient(server.address) as client:
        for _ in range(3):
            await client.route(token_ids=TOKENS)
    assert all(one.token_bytes for one in server.router.asked)


async def test_the_last_answer_counts(server: Server) -> None:
    async with KvRouteClient(server.address, hash_prompts=True) as client:
        for size in (16, 8, 0, 16):
            server.router.answer = pick_of(hash_block_size=size)
            await client.route(token_ids=TOKENS)
    sizes = [one.block_hashes.block_size for one in server.router.asked]
    assert sizes == [0, 16, 8, 0]


@pytest.mark.parametrize(
    "about",
    [
        {"lora_name": "l"},
        {"cache_salt": "s"},
        {"multimodal_items": []},
        {"request_id": "mine"},
        {"phase": Phase.PHASE_PREFILL},
        {"model": "another"},
    ],
)
async def test_what_hashes_differently_goes_as_tokens(
    server: Server, about: dict[str, Any]
) -> None:
    async with KvRouteClient(server.address, hash_prompts=True) as client:
        server.router.answer = pick_of(hash_block_size=16)
        await client.route(token_ids=TOKENS)
        server.router.answer = pick_of()
        await client.route(token_ids=TOKENS, **about)
        server.router.answer = pick_of(hash_block_size=16)
        await client.route(token_ids=TOKENS)
    assert server.router.asked[1].token_bytes
    assert server.router.asked[2].block_hashes.block_size == 16, "the other one tells nothing of it"


async def test_prompts_that_are_none_are_refused_as_ever(server: Server) -> None:
    server.router.answer = pick_of(hash_block_size=16)
    async with KvRouteClient(server.address, hash_prompts=True) as client:
        await client.route(token_ids=TOKENS)
        with pytest.raises(InvalidRequest, match="outside"):
            await client.route(token_ids=np.array([-1]))
        await client.route(token_ids=[])
    assert server.router.asked[-1].WhichOneof("prompt") == "token_bytes"


def test_models_are_bounded() -> None:
    hashing = PromptHashing()
    for number in range(MODELS_MAX + 1):
        hashing.answered(f"m{number}", 16)
    first, last = (
        RouteOptions(model="m0", token_ids=TOKENS),
        RouteOptions(model=f"m{MODELS_MAX}", token_ids=TOKENS),
    )
    assert hashing.hashed(first) == "m0"
    assert hashing.hashed(last) == f"m{MODELS_MAX}"
    assert "token_ids" in first
    assert "token_ids" not in last


@pytest.mark.parametrize("count", [0, 15, 16, 17, 640])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_xxhash_makes_the_hashes_of_the_router_s_kernel(count: int, block_size: int) -> None:
    tokens = pack_tokens([1_000_003 * number % (1 << 32) for number in range(count)])
    hashes = xxhash_hashing()(tokens, block_size)
    assert list(hashes) == block_hashes(tokens, block_size).tolist()
    assert block_hashes_of(hashes, block_size, count) == block_hashes_of(
        block_hashes(tokens, block_size), block_size, count
    )


@pytest.mark.parametrize("fast_lane", [True, False])
async def test_a_router_picks_the_same_by_hashes(fast_lane: bool) -> None:
    unguarded = GuardSettings(enabled=False)
    async with (
        served(guard=unguarded) as stage,
        client_of(stage, fast_lane=fast_lane) as client,
    ):
        stage.fleet.add("w0")
        stage.fleet.store(stage.fleet.add("w1"), prefix_hashes(HASHES))
        for _ in range(3):
            pick = await client.route(token_ids=TOKENS)
            assert pick.worker_id == "w1"
            assert pick.overlap_tokens.usable == 32
            assert pick.response.hash_block_size == 16
        forms = [one.prompt_tokens for one in stage.fleet.core.reservations._open.values()]
        assert forms == [40, 40, 40]


async def test_routers_want_tokens_where_hashes_would_not_do() -> None:
    async with served() as stage, client_of(stage, fast_lane=False) as client:
        stage.fleet.add("w0")
        assert (await client.route(token_ids=TOKENS)).response.hash_block_size == 16
        stage.fleet.core.copy_prefixes(HotPrefixSettings(enabled=True))
        assert not (await client.route(token_ids=TOKENS)).response.hash_block_size, "they are kept"
        stage.fleet.core.copy_prefixes(HotPrefixSettings(enabled=False))
        stage.fleet.add("tuned", lora_names=("ad",))
        tuned = await client.route(token_ids=TOKENS, model="ad")
        assert not tuned.response.hash_block_size, "its name counts"
        assert (await client.route(token_ids=TOKENS)).response.hash_block_size == 16
        stage.fleet.add("w1", block_size=32)
        assert not (await client.route(token_ids=TOKENS)).response.hash_block_size
