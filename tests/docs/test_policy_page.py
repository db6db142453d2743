"""The page on policies, followed by a reader who adds a policy: its modules decide picks."""

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from router.decide.policies import POLICIES
from router.decide.policies.policy import Policy
from tests.stage.fleet import Fleet, prompt
from tests.stage.pages import python_blocks, text_of

PAGE = Path("docs/choose-a-policy.md")
OWN = "my_policies:short_work"


@pytest.fixture
def modules() -> tuple[str, str]:
    """The page's modules: a policy of the reader's own, and the same as a built-in."""
    own, built_in = python_blocks(PAGE)
    return own, built_in


@pytest.fixture
def own_module(
    modules: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The first module, where the page says: in a file on the path."""
    (name,) = re.findall(r"^# (\w+\.py)$", modules[0], re.MULTILINE)
    (tmp_path / name).write_text(modules[0], encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("my_policies", None)


def a_fleet(policy: str) -> Fleet:
    """A worker that holds the prompt with a queue, and an idle one without it."""
    fleet = Fleet(policy=policy, own_policies=(OWN,) if policy == OWN else ())
    fleet.cache(fleet.add("holder"), prompt(3200))
    fleet.add("idle")
    return fleet


@pytest.mark.parametrize("name", POLICIES)
def test_the_page_has_every_policy(name: str) -> None:
    assert f"`{name}`" in text_of(PAGE).partition("## Add a policy")[0]


def test_the_root_page_leads_to_it_in_two_clicks() -> None:
    root = text_of(Path("README.md"))
    assert re.search(r"add a policy of your own \| \[[^]]*\]\(docs/choose-a-policy\.md\)", root)
    assert "(#add-a-policy-of-your-own)" in text_of(PAGE)


@pytest.mark.usefixtures("own_module")
def test_the_policy_of_ones_own_picks_by_its_cost() -> None:
    fleet = a_fleet(OWN)
    pick = fleet.route(prompt(3200))
    assert pick.decision.policy.name == OWN
    assert pick.reservation.worker.worker_id == "holder"
    # 16 tokens are always new; then 6 requests of 500 tokens are worth less than 3,184 cached ones
    assert pick.decision.scores.costs.tolist() == [16.0, 3200.0]
    for worker in list(fleet.relays):
        if worker.worker_id == "holder":
            fleet.say(worker, running=7)
    assert fleet.picked(prompt(3200)) == "idle"
    assert not fleet.core.decider.policy_failures


def test_the_policy_as_a_built_in_picks_alike_and_takes_its_parameter(
    modules: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("short_work")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(modules[1], module.__dict__)
    policy = module.SHORT_WORK
    assert isinstance(policy, Policy)
    monkeypatch.setitem(POLICIES, policy.name, replace(policy))
    assert a_fleet(policy.name).picked(prompt(3200)) == "holder"
    fleet = Fleet(policy=policy.name, parameters={policy.name: {"request_tokens": 0}})
    fleet.say(fleet.add("busy"), running=90)
    decision = fleet.core.decide(fleet.request(prompt(320)), fleet.now_s)
    assert decision.scores.costs.tolist() == [320.0]
    assert policy.described() == {"request_tokens": "tokens a request counts as; at least 0"}
