"""Finds recordings in files and folders, and says in one line what is wrong with one.

A recording is an object in JSON: a file, an item of a list in one, or a line of JSONL, plain or
packed with gzip. A bare list of messages is one, too.
"""

import codecs
import gzip
import re
import tomllib
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import msgspec

from conserve_lab.workloads.plan import WorkloadError, require

# Neither hidden files and folders, nor what macOS keeps beside a file (`._*`).
_FILES = re.compile(r"(?i)([^./][^/]*/)*[^./][^/]*\.(json|jsonl|ndjson)(\.gz)?")
_LINES = re.compile(r"(?i).+\.(jsonl|ndjson)(\.gz)?")
# A list of messages is one conversation.
_MESSAGES = re.compile(rb'\[\s*\{\s*"(role|content|from|value)"')
# Enough of a file to know its kind, and of a value to recognize it.
_HEAD_BYTES, _SHOWN_BYTES = 4096, 60

_AS_MESSAGES = '{"messages": [{"role", "content"}, ...]}'
_AS_REQUESTS = '{"timestamp": ms, "input_length", "output_length"}'
_READ = (
    'of no known kind; read are weka_trace ({"id", "requests"}), Mooncake\'s requests '
    f'({_AS_REQUESTS}), and conversations ({_AS_MESSAGES}, or ShareGPT\'s {{"conversations"}})'
)
_KINDS = tomllib.loads(Path(__file__).with_name("kinds.toml").read_text())
_BROKEN = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_CHOICES = {"type": "n, s or subagent", "hash_id_scope": "local, global or per_context"}
_IN_WORDS = {"int": "whole number", "float": "number", "str": "text", "array": "list", "|": "or"}


class Recording(NamedTuple):
    """One recording; errors call it by its name."""

    name: str
    file: Path
    read: Callable[[], bytes]


# Errors of what was left out; None: nothing is, and an error ends the reading.
Skipped = list[WorkloadError] | None


@contextmanager
def skipping(skipped: Skipped) -> Iterator[None]:
    try:
        yield
    except WorkloadError as error:
        if skipped is None:
            raise
        skipped.append(error)


def notes_of(skipped: Skipped) -> tuple[str, ...]:
    return tuple(f"Skipped lines or files: {len(skipped or ())}; {one}" for one in skipped or ())[
        :1
    ]


def recordings(source: Path, skipped: Skipped = None) -> list[Recording]:
    """Return the recordings in a folder, its folders included, or in one file; by path.

    A file alone is JSONL if it is written so, whatever its name.
    """
    inside = sorted(path for path in source.rglob("*") if path.is_file())
    files = [path for path in inside if _FILES.fullmatch(str(path.relative_to(source)))]
    files = [source] if source.is_file() else files
    for path in [] if files else inside:
        head_of(path)
    require(bool(files), f"{source} has no recordings (*.json or *.jsonl, plain or .gz)")
    found: list[Recording] = []
    for path in files:
        with skipping(skipped):
            found.extend(_recordings(path, len(files) == 1))
    return found


def _recordings(path: Path, alone: bool) -> Iterator[Recording]:
    head, lines = head_of(path), _lines(path)
    require(not re.fullmatch(rb"(\[\s*\])?\s*", head), f"{path} is empty")
    whole = Recording(str(path), path, partial(_read, path))
    first = list(islice(lines, 2)) if alone else []
    if _LINES.fullmatch(path.name):
        yield from (*first, *lines)
    elif head.startswith(b"[") and not _MESSAGES.match(head):
        yield from _items(whole)
    elif len(first) == 2 and first[0].read().rstrip().endswith(b"}"):
        yield from (*first, *lines)
    else:
        yield whole


def head_of(path: Path) -> bytes:
    """Return how a file begins; WorkloadError if it is of another known kind."""
    with _open(path) as file:
        head = file.read(_HEAD_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
    text = head.decode("latin-1")
    columns = "" if text.startswith("{") else text.partition("\n")[0]
    _refuse_if(str(path), "starts", text.startswith)
    _refuse_if(str(path), "columns", columns.__contains__)
    return head


def _lines(path: Path) -> Iterator[Recording]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.isspace():
                yield _kept(f"{path}, line {number}", path, line.removeprefix(codecs.BOM_UTF8))


def _items(whole: Recording) -> Iterator[Recording]:
    for number, item in enumerate(_decode(whole, whole.read(), list[msgspec.Raw]), 1):
        yield _kept(f"{whole.name}, item {number}", whole.file, bytes(item))


def _kept(name: str, file: Path, content: bytes) -> Recording:
    return Recording(name, file, partial(zlib.decompress, zlib.compress(content, 1)))


def _read(path: Path) -> bytes:
    with _open(path) as file:
        return file.read().removeprefix(codecs.BOM_UTF8)


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    try:
        with path.open("rb") as file, gzip.open(file) as unpacked:
            packed = file.peek(2).startswith(b"\x1f\x8b")
            yield cast(IO[bytes], unpacked) if packed else file
    except (OSError, EOFError, zlib.error) as error:
        raise WorkloadError(f"{path} cannot be read: {error}") from None


# --- Their content --------------------------------------------------------------------------------


def read_json(one: Recording, kinds: Mapping[str, Any]) -> Any:
    """Return a recording as the type that belongs to the first of these fields that it has.

    WorkloadError says which field is wrong, or which kind of file it is.
    """
    content = one.read()
    if content.lstrip().startswith(b"["):
        content = b'{"messages":' + content + b"}"
    fields = _decode(one, content, dict[str, msgspec.Raw])
    _refuse_if(one.name, "variants", lambda names: fields.keys() >= {*names.split()})
    for name, kind in kinds.items():
        if name in fields:
            return _decode(one, content, kind)
    _refuse_if(one.name, "fields", lambda names: fields.keys() >= {*names.split()})
    raise WorkloadError(f"{one.name}: {_shown(fields)} is {_READ}")


def _refuse_if(name: str, by: str, found: Callable[[str], bool]) -> None:
    for mark, kind in _KINDS[by].items():
        if found(mark):
            what = kind.format(messages=_AS_MESSAGES, requests=_AS_REQUESTS)
            raise WorkloadError(f"{name} is {what}")


def _decode(one: Recording, content: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(content, type=kind)
    except _BROKEN as error:
        problem = str(error)
    try:
        found = msgspec.json.decode(content)
    except _BROKEN as error:
        at = re.search(r"\(byte (\d+)\)", str(error))
        line = content.count(b"\n", 0, int(at[1])) + 1 if at else 1
        where = f", line {line}," if line > 1 else ""
        raise WorkloadError(f"{one.name}{where} is not JSON: {error}") from None
    # In msgspec's words: what is wrong, and where.
    problem, _, place = problem.partition(" - at `$")
    steps = re.findall(r"\[(\d+)\]|([^.`\[\]]+)", place)
    with suppress(LookupError, TypeError):  # Of a field that comes twice, this is the last.
        for index, name in steps:
            found = found[int(index)] if index else found[name]
    expected = re.sub(r"^Expected |, got .*|^Object missing required |`", "", problem)
    expected = re.sub(r"\w+|\|", lambda word: _IN_WORDS.get(word[0], word[0]), expected)
    expected = _CHOICES[steps[-1][1]] if problem.startswith("Invalid") else expected
    where = ": ".join((one.name, *filter(None, [place.strip(".`")])))
    raise WorkloadError(f"{where}: expected {expected}, found {_shown(found)}")


def _shown(value: Any) -> str:
    shown = " ".join(msgspec.json.encode(value).decode(errors="replace").split())
    return shown if len(shown) <= _SHOWN_BYTES else f"{shown[:_SHOWN_BYTES]}..."
