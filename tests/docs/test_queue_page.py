"""The page on the queue names every order that `kvroute serve` takes, as the program has it."""

import re
from pathlib import Path

from router.config.settings.queue_settings import QueueSettings
from router.decide.queue_order.orders import ORDERS
from tests.stage.pages import text_of

PAGE = Path("docs/queue.md")


def test_every_order_has_a_row_with_its_aging() -> None:
    table = text_of(PAGE).partition("## What it costs")[0]
    rows = {
        name: cells.split(" | ")
        for name, cells in re.findall(r"^\| `([a-z-]+)`[^|]* \| (.*) \|$", table, re.MULTILINE)
    }
    for order in ORDERS.values():
        aging = rows[order.name][1].replace(",", "")
        number = re.match(r"[\d.]+", aging)
        assert (float(number[0]) if number else 0.0) == order.aging, order.name


def test_every_key_is_named() -> None:
    page = text_of(PAGE)
    assert [key for key in QueueSettings.__struct_fields__ if key not in page] == []
