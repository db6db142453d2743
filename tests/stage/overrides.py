"""Methods that replace one of the product's, and what is left of it when that one has gone."""

import inspect
from types import ModuleType


def without_base(module: ModuleType) -> list[str]:
    """Methods of a module's classes that are marked as overrides and replace nothing: a fault that
    they were to make is made no longer."""
    return [
        f"{cls.__name__}.{name}"
        for cls in vars(module).values()
        if inspect.isclass(cls) and cls.__module__ == module.__name__
        for name, method in vars(cls).items()
        if getattr(method, "__override__", False)
        and not any(hasattr(base, name) for base in cls.__mro__[1:])
    ]
