"""The edge lab: several unequal hosts on slow links, in one machine. Standard library only; needs Linux and root.

accept_mpi.device.fleet (describes the hosts) -> cgroups, network, shells (the parts of a host) -> running (commands that run
in a lab) -> laboratory (up, change, down) -> cli.
"""

from accept_mpi.errors import UserError


class LabError(UserError):
    """A mistake that the user can fix, in one sentence."""
