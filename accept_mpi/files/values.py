"""Values of TOML and JSON files that another person may have written: no dates, nothing infinite, too deep or too long."""

import math
import tomllib
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accept_mpi.errors import UserError, one_line

_DEEPEST = 32
_MOST_VALUES = 100_000


def loads(text: str) -> dict[str, Any]:
    """Parse TOML. Raises ValueError (TOMLDecodeError for its syntax) if the text is invalid or nested too deeply."""
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:  # from int() or datetime
        raise ValueError(f"a number or a date in it is none: {error}") from error


def every_value(value: Any, deepest: int) -> Iterator[Any]:
    """Yield a value of a JSON or TOML file and everything that it contains. Raises ValueError if it is nested more than
    ``deepest`` deep."""
    left = [(value, 0)]
    while left:
        part, depth = left.pop()
        if depth > deepest:
            raise ValueError(f"is nested more than {deepest} deep")
        yield part
        inside = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        left += [(each, depth + 1) for each in inside]


def check_values(tree: Mapping[str, Any], source: str, free: Sequence[str] = ()) -> None:
    """Raise UserError, a sentence that begins with ``source`` and names the key, if something in ``tree`` is not finite,
    larger than 64 bits, a date, nested more than 32 deep, or a text with control characters. Texts below the keys ``free``
    may hold any character that UTF-8 can write."""
    left: list[tuple[str, Any, int, bool]] = [("", tree, 0, False)]
    values = 0
    while left:
        path, value, depth, own = left.pop()
        at = f"{source}: {path}" if path else source
        values += 1
        if values > _MOST_VALUES:
            raise UserError(f"{source}: more than {_MOST_VALUES} values")
        if depth > _DEEPEST:
            raise UserError(f"{one_line(at, 200)}: nested more than {_DEEPEST} deep")
        if isinstance(value, dict):
            for key in value:
                _check_text(key, source, "a key", True)
                inside = f"{path}.{key}" if path else key
                left.append((inside, value[key], depth + 1, own or inside in free))
        elif isinstance(value, list):
            left += [(f"{path}[{number}]", entry, depth + 1, own) for number, entry in enumerate(value)]
        elif isinstance(value, str):
            _check_text(value, source, path, own)
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise UserError(f"{at}: expected a finite number, got {value}")
        elif isinstance(value, int):
            if not -(1 << 63) <= value < 1 << 63:
                shown = value if abs(value) < 1 << 999 else f"one of {value.bit_length()}"
                raise UserError(f"{at}: expected a number of at most 64 bits, got {shown}")
        else:
            raise UserError(f"{at}: expected a text, a number, true, false, a list or a table, got the date or time {value}")


def _check_text(text: str, source: str, what: str, own: bool) -> None:
    if text.isprintable():
        return
    for character in text:
        kind = unicodedata.category(character)
        if kind == "Cs" or (kind == "Cc" and not own):
            wanted = "in UTF-8" if kind == "Cs" else f"without control characters such as U+{ord(character):04X}"
            raise UserError(f'{source}: {what}: expected a text {wanted}, got "{one_line(text, 200)}"')
