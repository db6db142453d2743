"""A case of each field of Narrowing, for the tests of all that respects them."""

from dataclasses import dataclass
from typing import Any

from router.request.narrowing import Narrowing


@dataclass(frozen=True)
class Case:
    """A request that worker `a` may take, and workers `b`, `c` and `d` may not."""

    narrowing: Narrowing
    """With this field alone."""
    options: dict[str, Any]
    """The same by the contract's names."""
    fit: dict[str, Any]
    """What `a` says of itself."""
    unfit: dict[str, Any]
    """What the others say."""


CASES = {
    "lora_name": Case(
        Narrowing("ad"), {"lora_name": "ad"}, {"lora_names": ("ad",)}, {"lora_names": ("other",)}
    ),
    "required_labels": Case(
        Narrowing(required_labels=frozenset({("zone", "1")})),
        {"required_labels": {"zone": "1"}},
        {"labels": {"zone": "1"}},
        {"labels": {"zone": "2"}},
    ),
    "allowed_workers": Case(
        Narrowing(allowed_workers=frozenset("a")), {"allowed_worker_ids": ["a"]}, {}, {}
    ),
    "excluded_workers": Case(
        Narrowing(excluded_workers=frozenset("bcd")),
        {"excluded_worker_ids": ["b", "c", "d"]},
        {},
        {},
    ),
    "excluded_labels": Case(
        Narrowing(excluded_labels=frozenset({("capacity", "spot")})),
        {"excluded_labels": {"capacity": "spot"}},
        {"labels": {"capacity": "own"}},
        {"labels": {"capacity": "spot"}},
    ),
}
FIELDS = Narrowing._fields
"""A field without a case fails the tests that go over these."""
