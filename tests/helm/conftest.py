"""Releases that several tests look at, each rendered once."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import helm_python as helm
import pytest

from tests.helm.rendered import CHART, Rendered, values_of


@pytest.fixture(scope="session")
def chart() -> Iterator[helm.Chart]:
    with helm.Chart.load(CHART) as loaded:
        yield loaded


@pytest.fixture(scope="session")
def render(chart: helm.Chart) -> Callable[..., Rendered]:
    """Renders any values, each set of them once."""
    done: dict[str, Rendered] = {}

    def render_once(**values: Any) -> Rendered:
        key = json.dumps(values, sort_keys=True)
        if key not in done:
            done[key] = Rendered(chart, values)
        return done[key]

    return render_once


@pytest.fixture(scope="session")
def default(render: Callable[..., Rendered]) -> Rendered:
    return render()


@pytest.fixture(scope="session")
def production(render: Callable[..., Rendered]) -> Rendered:
    return render(**values_of("production"))


@pytest.fixture(scope="session")
def small_fleet(render: Callable[..., Rendered]) -> Rendered:
    return render(**values_of("small-fleet"))


@pytest.fixture(scope="session")
def with_engine(render: Callable[..., Rendered]) -> Rendered:
    return render(**values_of("vllm-with-relay"))
