"""Read the job file: TOML -> ``Job``. Every mistake is reported in one sentence that names the file and the key."""

import codecs
import difflib
import functools
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, time
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from accept_mpi.contradictions import contradictions
from accept_mpi.errors import UserError, one_line
from accept_mpi.files.regular import read_regular
from accept_mpi.files.values import check_values, loads
from accept_mpi.job import GOES_WITH, MOST_ENTRIES, Job, Optimizer
from accept_mpi.registry import nearest

_MOST_BYTES = 1 << 20  # size limit of a job file
_FOR_EVER = 2e6  # seconds: longer timeouts overflow the kernel's, which count milliseconds in 31 bits
_EITHER = ((("train", "epochs"), ("train", "steps")), (("train", "lr"), ("train", "optimizer", "lr")))
"""Pairs of keys that set the same thing: at most one of a pair may be given."""
_FREE = ("model.args", "data.args")
"""Tables whose values are arguments of the user's own functions."""
_SECONDS = ("probe_seconds", "timeout", "startup_timeout")
_MARKS = {
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),  # first, since its mark begins with UTF-16's
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}
"""Byte order marks of files that are not in UTF-8."""


def read_text(path: Path, what: str = "job file") -> str:
    """Text of a job file in UTF-8, with or without a byte order mark, or of another file (``what``) that is read like one.
    Raises UserError with one sentence."""
    try:
        data = read_regular(path, _MOST_BYTES)
    except OSError as error:
        raise UserError(f"{path}: cannot read the {what}: {error.strerror}") from error
    for encoding, marks in _MARKS.items():
        if data.startswith(marks):
            raise UserError(f"{path}: cannot read the {what}: it is {encoding}; save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        wrong = f"byte {error.start} (0x{data[error.start]:02x}) is not UTF-8"
        raise UserError(f"{path}: cannot read the {what}: {wrong}; save it as UTF-8") from error


def parse(text: str, source: str, overrides: Iterable[str] = ()) -> Job:
    """Job from TOML text. ``overrides`` are "section.key=value" with values in TOML (a bare word is a string; null takes the
    key out). An override removes a key of the text that sets the same thing under another name.

    Raises UserError with one sentence that begins with ``source``.
    """
    try:
        tree = loads(text)
    except ValueError as error:
        raise UserError(f"{source}: not valid TOML: {error}") from error
    _override_all(tree, overrides)
    check_values(tree, source, free=_FREE)
    _check_keys(tree, Job, source, "")
    try:
        job = msgspec.convert(tree, Job)
    except msgspec.ValidationError as error:
        raise UserError(f"{source}: {_explain(str(error), tree)}") from error
    if all(_has(tree, key) for key in _EITHER[1]):
        raise UserError(f"{source}: train: give either lr or optimizer.lr")
    _check_optimizer(job.train.optimizer, _table(tree, ("train", "optimizer")), source)
    for mistake in contradictions(job):
        raise UserError(f"{source}: {mistake}")
    seconds = {key: min(getattr(job.pipeline, key), _FOR_EVER) for key in _SECONDS}
    output = msgspec.structs.replace(job.output, directory=os.path.expanduser(job.output.directory))
    return msgspec.structs.replace(job, pipeline=msgspec.structs.replace(job.pipeline, **seconds), output=output)


def _override_all(tree: dict[str, Any], overrides: Iterable[str]) -> None:
    given: dict[str, Any] = {}
    for override in overrides:
        keys, value = _parts(override)
        if value == "null" and not _has(tree, keys):
            _check_keys(functools.reduce(lambda inside, key: {key: inside}, keys[::-1], {}), Job, f"--set {override}", "")
        for table in (tree, given):
            _override(table, keys, value, override)
    for pair in _EITHER:
        for one, other in (pair, pair[::-1]):
            if _has(given, one) and not _has(given, other) and _has(tree, other):
                del _table(tree, other[:-1])[other[-1]]


def _parts(override: str) -> tuple[list[str], str]:
    """The keys and the value of "section.key=value"."""
    path, equals, value = override.partition("=")
    keys = [part.strip() for part in path.split(".")]
    if not equals or not all(keys):
        raise UserError(f'--set {override}: expected "section.key=value"')
    return keys, value.strip()


def _override(tree: dict[str, Any], keys: Sequence[str], value: str, override: str) -> None:
    *sections, key = keys
    table = tree
    for section in sections:
        table = table.get(section, {}) if value == "null" else table.setdefault(section, {})
        if not isinstance(table, dict):
            raise UserError(f'--set {override}: "{section}" is not a table')
    if value == "null":
        table.pop(key, None)
        return
    is_text, as_text = _takes_text(".".join(keys)), {"value": value}
    try:
        found = loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        found = as_text
    except ValueError as error:
        if not is_text:
            raise UserError(f"--set {override}: {error}") from error
        found = as_text
    if len(found) != 1:
        raise UserError(f"--set {override}: expected one value")
    if is_text and isinstance(found["value"], int | float | date | time):  # such as a directory that is called 2026-11-30
        found = as_text
    table[key] = found["value"]


def _takes_text(path: str) -> bool:
    """True if all values of a key are texts."""
    try:
        return _words(_kind(path)) == "a text"
    except (StopIteration, IndexError):  # there is no such key, or it is the user's own
        return False


def _table(tree: Any, keys: Sequence[str]) -> dict[str, Any]:
    """Table at a path of keys; an empty one if there is none."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else {}


def _has(tree: Mapping[str, Any], keys: Sequence[str]) -> bool:
    return keys[-1] in _table(tree, keys[:-1])


def _check_keys(table: Mapping[str, Any], section: type[msgspec.Struct], source: str, path: str) -> None:
    """Raise UserError for unknown keys, with a better explanation than msgspec's."""
    fields = {field.name: field.type for field in msgspec.structs.fields(section)}
    for key, value in table.items():
        if key not in fields:
            raise UserError(f'{source}: unknown key "{path}{key}"{_nearest_key(key, list(fields))}')
        inside = _table_in(fields[key])
        entries = [("", value)] if isinstance(value, dict) else []
        if isinstance(value, list):
            entries = [(f"[{n}]", entry) for n, entry in enumerate(value) if isinstance(entry, dict)]
        for place, entry in entries if inside else ():
            _check_keys(entry, inside, source, f"{path}{key}{place}.")


def _table_in(kind: Any) -> Any:
    """The table that values of a type are, or hold as entries of a list; None if there is none."""
    for one in map(_bare, _alternatives(kind)):
        if get_origin(one) is list:
            return _table_in(get_args(one)[0])
        if _is_table(one):
            return one
    return None


def _is_table(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _nearest_key(key: str, here: list[str]) -> str:
    """Hint at a key that is almost the same in this section, else at one of the same name in another section, else at a
    similar one in this section, else anywhere."""
    if close := difflib.get_close_matches(key, here, n=1, cutoff=0.85):
        return nearest(close[0], here)
    names: dict[str, str] = {}
    for path in sorted(_paths(Job, ""), key=lambda path: path.count(".")):
        names.setdefault(path.rpartition(".")[2], path)
    if key not in names and (hint := nearest(key, here)):
        return hint
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    return f'; did you mean "{names[close[0]]}"?' if close else ""


def _paths(section: type[msgspec.Struct], before: str) -> Iterator[str]:
    """Full names of all keys of a section and of its subsections, such as "train.optimizer.lr"."""
    for field in msgspec.structs.fields(section):
        yield before + field.name
        if _is_table(field.type):
            yield from _paths(field.type, f"{before}{field.name}.")


def _check_optimizer(optimizer: Optimizer, given: Mapping[str, Any], source: str) -> None:
    for key in given:
        by, choices = GOES_WITH.get(key, ("name", (optimizer.name,)))
        chosen = getattr(optimizer, by)
        if chosen not in choices:
            words = " or ".join(f'"{choice}"' for choice in choices)
            raise UserError(f'{source}: train.optimizer.{key} goes with {by} = {words} only; leave it out for "{chosen}"')
    if optimizer.nesterov and not optimizer.momentum:
        raise UserError(f"{source}: train.optimizer.nesterov = true needs a momentum, e.g. momentum = 0.9")


def _explain(error: str, tree: Mapping[str, Any]) -> str:
    """Turn msgspec's "Expected `int`, got `str` - at `$.train.steps`" into "train.steps: expected a whole number, got
    ..."."""
    message, _, where = error.partition(" - at `$")
    path = where.rstrip("`").lstrip(".").removesuffix("[...]")  # a value of a table with free keys
    missing = re.match(r"Object missing required field `(\w+)`", message)
    if missing:
        return f'missing key "{path + "." if path else ""}{missing[1]}"'
    value: Any = tree
    for part in re.findall(r"[^.\[\]]+", path):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, ValueError, TypeError):
            return f"{path}: {message[0].lower()}{message[1:]}"
    if isinstance(value, list) and len(value) > MOST_ENTRIES:
        return f"{path}: {len(value)} entries; at most {MOST_ENTRIES}"
    return f"{path}: expected {_words(_kind(path))}, got {_show(value)}"


def _show(value: Any) -> str:
    return one_line(json.dumps(value, ensure_ascii=False, default=str), 200)


def _kind(path: str) -> Any:
    """Type of the value at a path such as "train.optimizer.betas[0]"."""
    kind: Any = Job
    for part in re.findall(r"[^.\[\]]+", path):
        kinds = [_bare(one) for one in _alternatives(kind)]
        if part.isdigit():
            kind = next(get_args(one)[0] for one in kinds if get_origin(one) in (list, tuple))
        else:
            table = next(one for one in kinds if _is_table(one))
            kind = next(field.type for field in msgspec.structs.fields(table) if field.name == part)
    return kind


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _bare(kind: Any) -> Any:
    """Type without its limits."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _words(kind: Any) -> str:
    """Words for the values of a type: "a whole number >= 1", or 'one of "sgd", "adam"'."""
    kinds = [one for one in _alternatives(kind) if one is not type(None)]
    if len(kinds) > 1:
        return " or ".join(_words(one).removeprefix("one of ").replace('", "', '" or "') for one in kinds)
    (kind,) = kinds
    if get_origin(kind) is Annotated:
        plain, *limits = get_args(kind)
        if words := next((limit.description for limit in limits if limit.description), None):
            return str(words)
        signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
        bounds = [
            f"{signs[name]} {bound}" for limit in limits for name in signs if (bound := getattr(limit, name)) is not None
        ]
        empty = ", not empty" if any(limit.min_length for limit in limits) else ""
        return f"{_words(plain)} {' and '.join(bounds)}".rstrip().removesuffix(empty) + empty
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(f'"{word}"' for word in get_args(kind))
    if get_origin(kind) is list or (get_origin(kind) is tuple and get_args(kind)[-1] is ...):
        inside = _words(get_args(kind)[0]).replace(" or a list of ", " or lists of ")
        return re.sub(r"(number|text|table)\b", r"\1s", inside.replace("a ", "a list of ", 1))
    if get_origin(kind) is dict and get_args(kind)[1] is not Any:
        return "a table of such"
    if get_origin(kind) is tuple:
        return f"a list of {len(get_args(kind))} numbers"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}.get(kind, "a table")
