"""The gRPC contract: services, messages and enumerations of kvroute.v1, with their comments."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from router.net.keys.rights import RIGHTS
from tests.docs.reference.markdown import cell, code, plain, table

FILES = ("router", "fleet", "prompts")
FOLDER = Path(__file__).parents[3] / "proto" / "kvroute" / "v1"
HEAD = """# gRPC

Services, messages and enumerations of `kvroute.v1`. `python -m tests.docs.reference` makes this
page from [the .proto files](../proto/README.md), which are the contract and have the fields'
numbers: fields may be added, none changes its number or meaning. [Call it](call-it.md) has
examples, [statuses](reference-statuses.md) what a refusal means, [security](security.md) the
rights.
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
    blocks = [block for name in FILES for block in blocks_of(name)]
    known = {block.name for block in blocks}
    lines = [HEAD]
    for block in sorted(blocks, key=lambda block: ("service", "message", "enum").index(block.kind)):
        lines += [f"## {block.name}", "", plain(" ".join(block.comment.split())), ""]
        if block.kind == "service":
            cells = [
                (code(one.name), _types(one.kind, known), _right(block, one), cell(one.comment))
                for one in block.members
            ]
            lines += [*table(("method", "request -> answer", "right", "meaning"), cells), ""]
        elif block.members:
            lines += [*(_line(member, known) for member in block.members), ""]
    return "\n".join(lines)


def _line(member: Member, known: set[str]) -> str:
    """A field or a value in a list."""
    kind = f" {_types(member.kind, known)}" if member.kind else ""
    meaning = f": {plain(' '.join(member.comment.split()))}" if member.comment else ""
    return f"- `{member.name}`{kind}{meaning}"


def _right(block: Block, method: Member) -> str:
    right = RIGHTS[f"/kvroute.v1.{block.name}/{method.name}"]
    return code(right.value) if right else "none"


def _types(text: str, known: set[str]) -> str:
    """A type whose messages are links to their sections."""
    if "<" in text:
        return code(text)
    words = text.split(" ")
    return " ".join(f"[{word}](#{word.lower()})" if word in known else word for word in words)


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
