"""Tests of the comparison of pickers behind Envoy: its mixes, its sums and its table."""

import asyncio
from typing import Any

import pytest

from tests.bench.envoy_compared import MIXES, PLAIN, Answer, Client, Messages, result_of, table_of


class Listed(Client):
    """Keeps the chats that it is to send."""

    def __init__(self) -> None:
        self.sent: list[Messages] = []
        self.answers: list[Answer] = []
        self.failures: list[str] = []

    async def chat(self, messages: Messages) -> str:
        self.sent.append(list(messages))
        return ""


async def _sent(mix: Any, seed: int) -> list[str]:
    client = Listed()
    await mix(client, 0.2, seed)
    return [str(messages) for messages in client.sent]


@pytest.mark.parametrize("mix", ["system", "nothing"])
def test_a_mix_is_the_same_for_each_picker(mix: str) -> None:
    first = asyncio.run(_sent(MIXES[mix], 3))
    assert first == asyncio.run(_sent(MIXES[mix], 3))
    assert first
    assert len(set(first)) == len(first)
    assert first != asyncio.run(_sent(MIXES[mix], 4))


def test_a_row_has_medians_of_the_seeds_and_the_ratio_to_the_second_picker() -> None:
    client = Listed()
    client.answers = [Answer(0.1, 0.8, 100, 50), Answer(0.3, 0.9, 300, 250)]
    client.failures = ["TimeoutError: "]
    rows = [
        result_of("agents", name, seed, client, spent, 64.0)
        for name, seed, spent in (
            ("kvroute", 1, (0.01, 0.002)),
            ("before", 1, (0.02, 0.002)),
            ("kvroute", 2, (0.03, 0.002)),
            (PLAIN, 1, (0.002,)),
        )
    ]
    assert rows[0].ttft_ms == 200.0
    assert rows[0].cached_share == 0.75
    assert rows[0].picker_cpu_s == 5.0
    assert rows[3].picker_cpu_s == 0.0
    assert rows[3].envoy_cpu_s == 1.0
    cells = [list(column.cells) for column in table_of(rows).columns]
    assert cells[1] == ["kvroute", "before", PLAIN]
    assert cells[2] == ["4", "2", "2"]
    assert cells[-2] == ["2", "1", "1"]
    assert cells[-1] == ["1.00", "", ""]
