"""Words that sources do not use.

`told`, `asked`, `found`, `one` stand for too many things (a message, a text, a heartbeat, a worker,
rows): code and prose say which.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUFFIXES = (".py", ".pyx", ".pyi", ".h")
FOLDERS = ("events", "indexer", "router", "simulator", "proto/kvroute/client")
WORDS = (
    "told",
    "asked",
    "heard",
    "found",
    "who",
    "whoever",
    "whom",
    "somebody",
    "everybody",
    "anew",
    "heed",
)
NAMES = {"told", "asked", "heard", "found", "some", "one", "ones", "way", "who", "whom"}
"""No variable or argument has one of these names."""
PREPOSITIONS = re.compile(
    r"(about|above|across|after|against|along|among|around|as|at|before|behind|below|beside|besides"
    r"|between|beyond|by|during|for|from|in|inside|into|like|near|of|off|on|out|outside|over|per"
    r"|since|through|to|toward|towards|under|until|up|upon|via|with|within|without)\s",
    re.IGNORECASE,
)
REPLACED = {
    "peer": "replica, for another router of a fleet; in comparisons the other router, or its name",
    "epp": "picker",
    "lane": "stream, for a client's",
    "face": "what it is: the gateway, a gRPC service, an API, a port",
    "front": "what it is: the gateway, the console, a port",
    "strained": "over estimate",
    "strain": "over estimate",
    "kept map": "saved ledger",
    "fast path": "nothing: there is one road",
    "general path": "nothing: there is one road",
}
"""Words that stand for a thing which has another one in the glossary: word -> its word there."""
OWN = re.compile(
    r"\.peer\b|get_?peer\w*|peername|peercert|peer_spiffe_id|NetworkPolicyPeer"
    r"|conformance_epp|_in_front\b|(?i:topologySpreadConstraints?|Hugging Face)"
)
"""Names of gRPC, asyncio, Kubernetes and the conformance suite."""
PLACES = {
    "peer": ("router/net/",),  # the other end of a connection, as RFC 9113 calls it
    "front": ("router/decide/queue_turns/pool_share.py",),  # of a queue
}
"""Word -> where it has its common meaning."""
PROSE = {"front"}
"""Words that texts need: these are looked for in names of several words alone."""
KINDS = {
    *(".py", ".pyx", ".pxd", ".pyi", ".h", ".proto", ".md", ".js", ".html", ".css"),
    *(".json", ".yaml", ".yml", ".tpl", ".txt", ".toml"),
}
"""Files of the sources, the chart and the pages, whose names and texts are read."""
TREES = ("docs", "events", "helm", "indexer", "proto", "router", "simulator")
ALLOWED = re.compile(
    r"def (told|heard)\b|[.>](told|heard)\b|\btold: tuple|\btold, digest|\btold and digest"
    r'|\bdigest and told\b|`told`|"resync asked for"'
)
"""The index's name for the blocks that a worker reported, and a log line that operators search."""
PAGES = ("README.md", "docs", "events", "helm", "indexer", "proto", "simulator")
PAGE_WORDS = ("told", "asked", "whoever", "whom", "somebody", "everybody", "anew", "heed")
_ANY = re.compile(rf"\b({'|'.join({*WORDS, *PAGE_WORDS})})\b", re.IGNORECASE)


@cache
def sources(folder: str) -> list[Path]:
    return [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]


@cache
def lines_of(path: Path) -> tuple[tuple[int, str], ...]:
    """Numbers and texts of the lines with any of the words; each file is read once."""
    lines = enumerate(path.read_text().splitlines(), 1)
    return tuple((number, line) for number, line in lines if _ANY.search(line))


def lines_with(word: str, folder: str) -> list[str]:
    pattern = re.compile(rf"\b{word}\b", re.IGNORECASE)
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sources(folder)
        for number, line in lines_of(path)
        if pattern.search(ALLOWED.sub("", line))
    ]


def page_lines_with(word: str) -> list[str]:
    pages = [
        page
        for place in PAGES
        for page in ([ROOT / place] if place.endswith(".md") else (ROOT / place).rglob("*.md"))
    ]
    return [
        f"{page.relative_to(ROOT)}: {line}"
        for page in pages
        for _, line in lines_of(page)
        if re.search(rf"\b{word}\b", ALLOWED.sub("", line), re.IGNORECASE)
    ]


def names_in(path: Path) -> set[str]:
    """Names of variables and arguments."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    stored = {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return stored | {node.arg for node in nodes if isinstance(node, ast.arg)}


@cache
def texts() -> dict[str, list[tuple[int, str, str, str]]]:
    """Path -> its lines with any of the REPLACED words, as they are, cut into words, and their
    names of several words alone; of each file of TREES, generated code left out."""
    any_of = re.compile("|".join(word.split()[0] for word in REPLACED), re.IGNORECASE)
    paths = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "pyproject.toml"]
    paths += (
        path
        for tree in TREES
        for path in (ROOT / tree).rglob("*")
        if path.suffix in KINDS and "_pb2" not in path.name and "build" not in path.parts
    )
    read = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}
    return {
        path: [
            (number, line, split(cut := OWN.sub("", line)), split(" ".join(_NAME.findall(cut))))
            for number, line in enumerate([path, *text.splitlines()])
            if any_of.search(line)
        ]
        for path, text in read.items()
    }


_NAME = re.compile(r"\b(?:[A-Za-z0-9]+_\w+|_\w+|[a-z]+[A-Z]\w*|[A-Z][a-z0-9]+[A-Z]\w*)\b")


def split(text: str) -> str:
    """A text with its names cut into their words: at underscores, dashes and capitals."""
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", text)
    return re.sub(r"[_\-\s]+", " ", text).lower()


def lines_of_word(word: str) -> list[str]:
    pattern = re.compile(rf"(?<![a-z0-9]){word}s?(?![a-z])")
    return [
        f"{path}:{number}: {line.strip()[:100]}"
        for path, lines in texts().items()
        if not path.startswith(PLACES.get(word, ("no such place",)))
        for number, line, whole, names in lines
        if pattern.search(names if word in PROSE else whole)
    ]


def test_a_name_is_cut_into_its_words() -> None:
    assert split("HttpPeers_lane, EPPPort kept-map") == "http peers lane, epp port kept map"


@pytest.mark.parametrize("word", REPLACED)
def test_a_thing_has_the_word_of_the_glossary(word: str) -> None:
    """In no name, text, metric, key or page."""
    assert lines_of_word(word) == [], f"its word is {REPLACED[word]}"


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("word", WORDS)
def test_a_word_is_not_used(word: str, folder: str) -> None:
    assert lines_with(word, folder) == []


@pytest.mark.parametrize("word", PAGE_WORDS)
def test_a_word_is_on_no_page(word: str) -> None:
    assert page_lines_with(word) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_docstring_begins_with_what_it_describes(folder: str) -> None:
    """An attribute's, too: it would lean on the line above it, which its reader may not have."""
    leaning = {
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path in sources(folder)
        if path.suffix == ".py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(text := node.value.value, str) and PREPOSITIONS.match(text)
    }
    assert leaning == set()


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_name_says_what_it_is(folder: str) -> None:
    vague = {
        str(path.relative_to(ROOT)): sorted(names & NAMES)
        for path in sources(folder)
        if path.suffix == ".py" and (names := names_in(path)) & NAMES
    }
    assert vague == {} or all(names == ["told"] for names in vague.values()), vague
