"""The gRPC contract: services, messages and enumerations of kvroute.v1, with their comments."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from router.net.keys.rights import RIGHTS
from tests.docs.reference.markdown import cell, code, plain, table

FILES = ("router", "fleet", "prompts")
FOLDER = Path(__file__).parents[3] / "proto" / "kvroute" / "v1"
HEAD = """# gRPC

The methods of `kvroute.v1` with [the right](security.md#keys) that each needs, made by
`python -m tests.docs.reference`. The .proto files are the contract, with every message and field
({files}): fields may be added, none changes its number or meaning. [Call it](call-it.md) has
examples, [statuses](reference-statuses.md) what a refusal means.

A method `Name` takes `NameRequest` and answers `NameResponse`, unless its row says otherwise.
"""
_BLOCK = re.compile(r"(service|message|enum|oneof) (\w+) \{")
_EMPTY = re.compile(r"message (\w+) \{\}")
_RPC = re.compile(r"rpc (\w+)\((.*?)\) returns \((.*?)\);")
_FIELD = re.compile(r"(?:(repeated|optional) )?([\w.]+|map<.*?>) (\w+) = (\d+)(?: \[.*?\])?;")
_VALUE = re.compile(r"(\w+) = (\d+);")


@dataclass
class Member:
    """A method, a field or a value."""

    name: str
    kind: str
    number: str
    comment: str


@dataclass
class Block:
    """A service, a message or an enumeration."""

    kind: str
    name: str
    comment: str
    members: list[Member] = field(default_factory=list)


def page() -> str:
    links = [f"[{name}](../proto/kvroute/v1/{name}.proto)" for name in FILES]
    lines = [HEAD.format(files=", ".join(links))]
    for block in chain.from_iterable(map(blocks_of, FILES)):
        if block.kind == "service":
            comment = plain(" ".join(block.comment.split()))
            lines += [f"## {block.name}", "", comment, "", *_methods(block), ""]
    return "\n".join(lines)


def _methods(service: Block) -> list[str]:
    cells = [(code(one.name), _right(service, one), cell(_meaning(one))) for one in service.members]
    return table(("method", "right", "meaning"), cells)


def _meaning(method: Member) -> str:
    """The comment without the method's name before it; with types that the name does not give."""
    text = method.comment.removeprefix(f"{method.name} ").removeprefix("is ")
    request, answer = method.kind.replace("stream ", "").split(" -> ")
    if (request, answer) == (f"{method.name}Request", f"{method.name}Response"):
        return text if "stream" not in method.kind else f"{text} A stream of answers."
    return f"{text} `{method.kind}`"


def _right(block: Block, method: Member) -> str:
    right = RIGHTS[f"/kvroute.v1.{block.name}/{method.name}"]
    return code(right.value) if right else "none"


def blocks_of(name: str) -> Iterator[Block]:
    """Of one .proto file, in its order."""
    comment: list[str] = []
    block: Block | None = None
    choice = ""
    for line in (FOLDER / f"{name}.proto").read_text(encoding="utf-8").splitlines():
        text, _, behind = (part.strip() for part in line.partition("//"))
        if not text:
            comment = [*comment, behind] if line.strip() else []
            continue
        if found := _EMPTY.fullmatch(text):
            yield Block("message", found[1], " ".join(comment))
        elif found := _BLOCK.fullmatch(text):
            kind, own = found.groups()
            if kind == "oneof":
                choice = own
            else:
                block = Block(kind, own, " ".join(comment))
        elif text == "}":
            if choice:
                choice = ""
            elif block is not None:
                yield block
                block = None
        elif block is not None:
            block.members.append(_member(block, text, " ".join([*comment, behind]), choice))
        comment = []


def _member(block: Block, text: str, comment: str, choice: str) -> Member:
    """Raises ValueError for a line of another form."""
    if block.kind == "service" and (found := _RPC.fullmatch(text)):
        name, request, answer = found.groups()
        return Member(name, f"{request} -> {answer}", "", comment)
    if block.kind == "enum" and (found := _VALUE.fullmatch(text)):
        return Member(found[1], "", found[2], comment)
    if block.kind == "message" and (found := _FIELD.fullmatch(text)):
        label, kind, name, number = found.groups()
        if choice:
            comment = f"one of `{choice}`; {comment}" if comment.strip() else f"one of `{choice}`"
        return Member(name, f"{label} {kind}" if label else kind, number, comment.strip())
    raise ValueError(f"a line of another form: {text!r}")
