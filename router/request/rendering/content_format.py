"""Reads off a chat template's syntax tree, as engines do, whether it wants a message's content as a
list of parts.

Written from vLLM 0.32 (vllm/renderers/hf.py) and SGLang 0.5.23
(sglang/srt/parser/jinja_template_utils.py), read 2026-11-22. Both look for loops over a message's
content; vLLM follows assignments and macros, SGLang goes by the usual names of the loop's variable.
Pure.
"""

from collections.abc import Iterator

from jinja2 import nodes

_NAMES = ("message", "msg", "m")


def loops_over_named_content(tree: nodes.Template) -> bool:
    """SGLang's rule: whether some loop goes over the content of `message`, `msg` or `m`."""
    return any(
        _reads(loop.iter, name, "content") for loop in tree.find_all(nodes.For) for name in _NAMES
    )


def loops_over_content(tree: nodes.Template) -> bool:
    """vLLM's rule: whether some loop goes over the content of a message of any loop, or over
    `content`.

    False for a template that vLLM can't follow, such as a loop with two targets: it gets texts.
    """
    try:
        return any(_content_loops(tree))
    except _Unreadable:
        return False


class _Unreadable(Exception):
    """The template can't be followed further; vLLM then fails, too, and gives contents as texts."""


def _content_loops(tree: nodes.Template) -> Iterator[bool]:
    messages = _names_of_messages(tree)
    by_macro = list(_macro_loops(tree, messages))
    within = {id(loop) for loops, _ in by_macro for loop in loops}
    parameters = {id(loop): names for loops, names in by_macro for loop in loops if names}
    for loop in tree.find_all(nodes.For):
        over = loop.iter.name if isinstance(loop.iter, nodes.Name) else None
        if (
            any(_reads(loop.iter, name, "content") for name in messages)
            or (over is not None and over in parameters.get(id(loop), ()))
            or (over == "content" and id(loop) not in within)
        ):
            _target(loop)
            yield True


def _macro_loops(
    tree: nodes.Template, messages: list[str]
) -> Iterator[tuple[list[nodes.For], set[str]]]:
    """The loops of each macro, and those of its parameters that are given a content."""
    for macro in tree.find_all(nodes.Macro):
        parameters = [argument.name for argument in macro.args]
        given: set[str] = set()
        for call in tree.find_all(nodes.Call):
            if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
                continue
            named = [
                (argument.key, argument.value)
                for argument in call.kwargs
                if argument.key in parameters
            ]
            for name, value in [*zip(parameters, call.args, strict=False), *named]:
                if any(_reads(value, message, "content") for message in messages):
                    given.add(name)
        yield list(macro.find_all(nodes.For)), given


def _names_of_messages(tree: nodes.Template) -> list[str]:
    """Names of the variables of all loops over `messages`, or over a variable with its value."""
    lists = ["messages"]
    pending = ["messages"]
    while pending:
        name = pending.pop(0)
        for assignment in tree.find_all(nodes.Assign):
            if _reads(assignment.node, name):
                target = assignment.target
                if not isinstance(target, nodes.Name):
                    raise _Unreadable
                if target.name not in lists:
                    lists.append(target.name)
                    pending.append(target.name)
    return [
        _target(loop)
        for loop in tree.find_all(nodes.For)
        if any(_reads(loop.iter, name) for name in lists)
    ]


def _target(loop: nodes.For) -> str:
    if not isinstance(loop.target, nodes.Name):
        raise _Unreadable
    return loop.target.name


def _reads(node: nodes.Node, name: str, key: str | None = None) -> bool:
    """Whether a node reads the variable `name` (with key: that key of it), also by filter, test or
    slice."""
    while True:
        if isinstance(node, nodes.Filter | nodes.Test):
            if node.node is None:
                return False
            node = node.node
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            node = node.node
        else:
            break
    if key is None:
        return _is_variable(node, name)
    if isinstance(node, nodes.Getitem):
        return (
            _is_variable(node.node, name)
            and isinstance(node.arg, nodes.Const)
            and bool(node.arg.value == key)
        )
    return isinstance(node, nodes.Getattr) and _is_variable(node.node, name) and node.attr == key


def _is_variable(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
