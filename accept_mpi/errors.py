"""Exceptions for the ways a run can end that are not bugs of this package. Each has a message and the job's exit code."""

import re
import signal

INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C, the same as a shell's."""


_LINE_ENDS = re.compile(r"\s*[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]\s*")
_LONGEST = 2000


def one_line(text: str, most: int = _LONGEST) -> str:
    """Turn text from a file or from a user's code into one line for a terminal or a label. Control characters and characters
    that no encoding can write become escapes (``\\x1b``, ``\\udcff``); the middle of a text longer than ``most`` characters
    is left out."""
    text = _LINE_ENDS.sub(" ", text.strip())
    if len(text) > most:
        text = f"{text[: most // 2]} ... {text[len(text) - most // 2 :]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(text: str) -> str:
    """Shorten text of unknown origin to about 80 characters on one line, to quote it in a sentence."""
    return one_line(text, 80)


def counted(count: int, what: str) -> str:
    """A number of things as text: "1 stage", "3 stages"."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


class _Sentence(Exception):
    """Base class of exceptions whose message is always one line, whatever a user's code or a file has put into it."""

    def __str__(self) -> str:
        return one_line(super().__str__())


class UserError(_Sentence):
    """A mistake that the user can fix: shown as one sentence, never as a traceback. Exit code 2."""

    exit_code = 2


class Agreed(UserError):
    """A mistake that all ranks know of, so that they end together."""


class GroupRefused(Agreed):
    """A group of ranks cannot hold a stage, because of what its layers do."""


class TooFewDevices(Agreed):
    """The ranks that survive a loss cannot hold the model. Exit code 4: if their hosts are healthy, restarting the job can
    help."""

    exit_code = 4


class Stopped(_Sentence):
    """A signal ended the run, after a checkpoint. Exit code 3."""

    exit_code = 3


class NonFiniteLoss(_Sentence):
    """The loss became NaN or infinite. Exit code 1."""

    exit_code = 1


class UsersBug(Exception):
    """An exception raised by the user's own code: a layer, a loss, a data set or a hook. Shown with its traceback, since
    only the user can find the bug. Exit code 1."""

    exit_code = 1


class OutOfMemory(UsersBug):
    """This device ran out of memory. Exit code 1; ``launch`` restarts the run with less on this device."""


class DeadlineError(_Sentence):
    """A wait exceeded its deadline. The message says what was awaited, from whom and where. Exit code 1."""

    exit_code = 1


class ProtocolError(_Sentence):
    """A received message is invalid (magic, order, length or checksum): damaged on the way, or a bug. Exit code 1."""

    exit_code = 1
