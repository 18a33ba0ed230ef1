"""Types of command-line arguments: counts, sizes, seconds, links. Each raises ArgumentTypeError if the text does not fit."""

import argparse
import math
import re

_FLOAT = 4  # bytes
_LAST_PORT = 65535


def positive_integer(text: str) -> int:
    """A whole number from 1."""
    return _integer(text, 1)


def nonnegative_integer(text: str) -> int:
    """A whole number from 0."""
    return _integer(text, 0)


def port_number(text: str) -> int:
    """A port, or 0 for any."""
    if not re.fullmatch(r"\d{1,5}", text, re.ASCII) or int(text) > _LAST_PORT:
        raise argparse.ArgumentTypeError(f'expected a port from 1 to {_LAST_PORT}, or 0 for any, got "{text}"')
    return int(text)


def _integer(text: str, least: int) -> int:
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or int(text) < least:
        raise argparse.ArgumentTypeError(f'expected a whole number >= {least}, got "{text}"')
    return int(text)


def duration(text: str) -> float:
    """Seconds, more than 0."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:  # also refuses NaN
        raise argparse.ArgumentTypeError(f'expected seconds > 0, got "{text}"')
    return seconds


def byte_size(text: str) -> int:
    """Bytes from a text such as "64K", "16M" or a plain number."""
    found = re.fullmatch(r"([1-9]\d*)([KMG]?)", text)
    if not found:
        raise argparse.ArgumentTypeError(f'expected a size such as 4096, 64K or 16M, got "{text}"')
    size = int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2]]
    if size < _FLOAT:
        raise argparse.ArgumentTypeError(f"expected at least {_FLOAT} bytes, a float32 value, got {size}")
    return size


def link_speed(text: str) -> tuple[str, float]:
    """Host and Mbit/s from a text such as "edge2=10"."""
    host, _, rate = text.partition("=")
    if not re.fullmatch(r"\d+(\.\d+)?", rate) or not 0 < float(rate) < math.inf:
        raise argparse.ArgumentTypeError(f'expected a host and Mbit/s such as edge2=10, got "{text}"')
    return host, float(rate)
