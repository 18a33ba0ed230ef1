"""The edge lab: several unequal hosts on slow links in one machine. Standard library only; Linux, root.

accept_mpi.device.fleet (what the hosts are) -> cgroups, network, shells (what they are made of) -> laboratory (up, run,
change, down) -> cli.
"""

from accept_mpi.errors import UserError


class LabError(UserError):
    """Something that the user can mend, in one sentence."""
