"""The ways a run can end that are not bugs. Each carries one sentence and the exit code of the whole job."""

import re
import signal

INTERRUPTED = 128 + signal.SIGINT
"""Exit code of Ctrl-C, as shells have it."""


_LINE_ENDS = re.compile(r"\s*[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]\s*")
_LONGEST = 2000


def one_line(text: str, most: int = _LONGEST) -> str:
    """A text from a file or a user's code as one line for a terminal or a label: control characters and what no encoding
    can write as escapes (``\\x1b``, ``\\udcff``), its middle left out where it is longer than ``most`` characters."""
    text = _LINE_ENDS.sub(" ", text.strip())
    if len(text) > most:
        text = f"{text[: most // 2]} ... {text[len(text) - most // 2 :]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(text: str) -> str:
    """A text of unknown origin as a part of a sentence."""
    return one_line(text, 80)


class _Sentence(Exception):
    """Its text is one line, whatever a user's code or a file has put into it."""

    def __str__(self) -> str:
        return one_line(super().__str__())


class UserError(_Sentence):
    """Something the user can mend: shown as one sentence, never as a traceback. Exit code 2."""

    exit_code = 2


class Agreed(UserError):
    """A mistake that all ranks know of and end with together."""


class TooFewDevices(Agreed):
    """Those that are left after a loss cannot hold the model. Exit code 4: where their hosts are fine, a new start can."""

    exit_code = 4


class Stopped(_Sentence):
    """A signal ended the run, after a checkpoint. Exit code 3."""

    exit_code = 3


class NonFiniteLoss(_Sentence):
    """The loss became NaN or infinite. Exit code 1."""

    exit_code = 1


class UsersBug(Exception):
    """An exception in the user's own code while it ran: a layer, a loss, a data set, a hook. Shown with its traceback, since
    only the user can find it. Exit code 1."""

    exit_code = 1


class OutOfMemory(UsersBug):
    """This device's memory did not suffice. Exit code 1; ``launch`` begins again with less on this device."""


class DeadlineError(_Sentence):
    """A wait passed its deadline. The message says what was awaited, from whom, where. Exit code 1."""

    exit_code = 1


class ProtocolError(_Sentence):
    """A message that cannot be right (magic, order, length, checksum): damage on the way, or a bug. Exit code 1."""

    exit_code = 1
