"""The ways a run can end that are not bugs. Each carries one sentence and the exit code of the whole job."""

import signal

INTERRUPTED = 128 + signal.SIGINT
"""Exit code of Ctrl-C, as shells have it."""


class UserError(Exception):
    """Something the user can mend: shown as one sentence, never as a traceback. Exit code 2."""

    exit_code = 2


class Agreed(UserError):
    """A mistake that all ranks know of and end with together."""


class TooFewDevices(Agreed):
    """Those that are left after a loss cannot hold the model. Exit code 4: where their hosts are fine, a new start can."""

    exit_code = 4


class Stopped(Exception):
    """A signal ended the run, after a checkpoint. Exit code 3."""

    exit_code = 3


class NonFiniteLoss(Exception):
    """The loss became NaN or infinite. Exit code 1."""

    exit_code = 1


class UsersBug(Exception):
    """An exception in the user's own code while it ran: a layer, a loss, a data set, a hook. Shown with its traceback, since
    only the user can find it. Exit code 1."""

    exit_code = 1


class OutOfMemory(UsersBug):
    """This device's memory did not suffice. Exit code 1; ``launch`` begins again with less on this device."""


class DeadlineError(Exception):
    """A wait passed its deadline. The message says what was awaited, from whom, where. Exit code 1."""

    exit_code = 1


class ProtocolError(Exception):
    """A message that cannot be right (magic, order, length, checksum): damage on the way, or a bug. Exit code 1."""

    exit_code = 1
