"""Functions of the operator's own, which the configuration names as module:function."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from router.config.keys import ConfigError


def is_own(name: str) -> bool:
    """Whether a name is that of a function: module:function."""
    return ":" in name


def own_function(kind: str, name: str, where: str) -> Callable[..., Any]:
    """Imports the function named module:function; raises ConfigError.

    kind: what the function is to be. where: the configuration's key that names it.
    """
    module_name, _, function_name = name.partition(":")
    try:
        function: object = getattr(import_module(module_name), function_name, None)
    except Exception as error:  # whatever its import does is the operator's to mend
        sentence = f"{module_name!r} can't be imported: {type(error).__name__}: {error}"
        raise ConfigError(f"{kind} {name!r}: {sentence} - at `{where}`") from error
    if not callable(function):
        sentence = f"{module_name!r} has no function {function_name!r}"
        raise ConfigError(f"{kind} {name!r}: {sentence} - at `{where}`")
    return function
