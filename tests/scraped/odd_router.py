"""`kvroute` with a bug put in: one pick in a few ends with an exception, in the decision core."""

import itertools
from typing import Any

from router.app.main import main
from router.decide.core.core import RouterCore

ONE_IN = 4

_picks = itertools.count()
_route = RouterCore.route


def route(core: RouterCore, *about: Any, **options: Any) -> Any:
    if next(_picks) % ONE_IN == 0:
        raise RuntimeError("a bug")
    return _route(core, *about, **options)


if __name__ == "__main__":
    RouterCore.route = route  # type: ignore[method-assign]
    main()
