"""The settings of requests among those that a test gives to a gateway or a picker."""

from typing import Any

from router.config.settings.request_settings import RequestSettings


def taken_from(settings: dict[str, Any]) -> RequestSettings:
    """The settings of requests, which are taken out of the others."""
    names = settings.keys() & set(RequestSettings.__struct_fields__)
    return RequestSettings(**{name: settings.pop(name) for name in names})
