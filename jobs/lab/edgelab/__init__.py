"""The edge lab: several unequal hosts on slow links in one machine. Standard library only; Linux, root.

fleet (what the hosts are) -> cgroups, network (what they are made of) -> laboratory (up, run, change, down) -> cli.
"""


class LabError(Exception):
    """Something that the user can mend, in one sentence."""
