"""What mpirun starts in place of python: stands for a rank that tests/programs/template.py forks, and ends as that does.

``rank.py PYTHON ARGUMENT...``: where there is no template (its folder is in ACCEPT_MPI_TEMPLATE), or another environment
than the template's is asked for, python itself takes its place. Imports little, since it is started for every rank.
"""

import _socket as socket  # what the module around it imports takes as long as an interpreter's start
import array
import marshal
import os
import signal
import struct
import sys

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)


def connect(folder: str) -> "socket.socket | None":
    """The template, if it can give what is asked for."""
    try:
        with open(os.path.join(folder, "fixed"), "rb") as file:
            names, values = marshal.load(file)
        if values != {name: value for name, value in os.environ.items() if name.startswith(names)}:
            return None
        template = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        template.connect(os.path.join(folder, "socket"))
    except OSError:
        return None
    return template


def main() -> int:
    """The exit code of the forked rank; a signal that ended it ends this process, too."""
    python, *arguments = sys.argv[1:]
    template = connect(os.environ.get("ACCEPT_MPI_TEMPLATE", ""))
    if template is None:
        os.execv(python, [python, *arguments])

    def forward(number: int, _: object) -> None:
        try:
            template.send(bytes([number]))
        except OSError:
            return  # the rank has ended

    for number in FORWARDED:
        signal.signal(number, forward)
    request = marshal.dumps((arguments, os.getcwd(), dict(os.environ), list(os.sched_getaffinity(0))))
    files = array.array("i", [0, 1, 2])
    template.sendmsg([struct.pack("<i", len(request))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
    view = memoryview(request)
    while view:
        view = view[template.send(view) :]
    answer = template.recv(4)
    if len(answer) < 4:
        print("rank.py: the template has ended", file=sys.stderr)
        return 1
    code = os.waitstatus_to_exitcode(struct.unpack("<i", answer)[0])
    if code < 0:
        if -code in FORWARDED:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    os._exit(main())
