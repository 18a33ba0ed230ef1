"""``accept_mpi train``: trains as one rank of a job."""

import argparse

from accept_mpi.comm.runtime import Runtime
from accept_mpi.launch.stop_signals import end_undisturbed, tell_before_end
from accept_mpi.training.run import train
from accept_mpi.training.start import Options


def main(arguments: argparse.Namespace) -> int:
    """Run as one rank of the job; ends the process."""
    runtime = Runtime.start()
    tell_before_end(runtime.end_by_signal)
    options = Options(arguments.job, tuple(arguments.set), arguments.resume, arguments.quiet, arguments.run)
    try:
        train(runtime, options)
    except BaseException as error:
        runtime.fail(error)
    try:
        runtime.finish(0)
    finally:
        end_undisturbed()
