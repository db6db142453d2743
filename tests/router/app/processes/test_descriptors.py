"""The limit of open files: raised to the hard one, and a low hard one is warned of."""

import resource
import subprocess
import sys

import pytest

from events.plane.settings import Settings
from router.app.processes.descriptors import OTHERS, raise_limit, wanted_by
from router.config.settings.configurations import (
    GatewayConfig,
    PickerConfig,
    RelayConfig,
    ServeConfig,
)
from router.config.settings.gateway_settings import GatewayProcessSettings, GatewaySettings
from router.config.settings.serving_settings import HttpSettings, MetricsSettings

HTTP = HttpSettings(connections_max=100)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (ServeConfig(http=HTTP), 100 + 100),
        (ServeConfig(http=HTTP, metrics=MetricsSettings(listen="")), 100),
        (
            ServeConfig(
                http=HTTP,
                gateway=GatewaySettings(listen="127.0.0.1:0", open_max=50),
            ),
            100 + 100 + 100 + 50,
        ),
        (GatewayConfig(http=HTTP, gateway=GatewayProcessSettings(open_max=50)), 100 + 50),
        (PickerConfig(http=HTTP), 100 + 100),
        (RelayConfig(http=HTTP), 100),
    ],
)
def test_each_port_and_each_engine_s_request_is_a_file(config: Settings, wanted: int) -> None:
    assert wanted_by(config) == OTHERS + wanted


@pytest.mark.parametrize("hard", [64, 4096, 19_999])
def test_a_low_limit_is_raised_and_warned_of(hard: int) -> None:
    hard_now = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard_now != resource.RLIM_INFINITY and hard_now < hard:
        pytest.skip(f"this process may open {hard_now} files")
    script = f"""
import resource
from router.config.settings.configurations import ServeConfig
from router.app.processes.descriptors import raise_limit
resource.setrlimit(resource.RLIMIT_NOFILE, ({min(32, hard)}, {hard}))
raise_limit(ServeConfig())
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(hard), str(hard)]
    assert f"may open {hard} files" in done.stderr
    assert "lower http.connections_max" in done.stderr


def test_a_high_limit_is_silent(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    raise_limit(ServeConfig())
    assert not caplog.records


def test_a_limit_without_a_number_is_raised_as_far_as_the_system_takes_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []

    def take(_: int, limits: tuple[int, int]) -> None:
        if limits[0] == resource.RLIM_INFINITY:
            raise ValueError("current limit exceeds maximum limit")
        made.append(limits)

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", take)
    raise_limit(ServeConfig())
    assert made == [(10_240, resource.RLIM_INFINITY)]
    assert "may open 10240 files" in caplog.text
