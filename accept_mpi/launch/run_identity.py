"""What ``launch`` tells the ranks of a run that it begins, and begins again."""

import os
import re

import msgspec

_RANKS_HERE = "OMPI_COMM_WORLD_LOCAL_SIZE"
# A name becomes a folder's, so it may lead nowhere else.
_TEXT = re.compile(r"([\w-]{1,100})/(\d{1,9})(?:/(\d{1,5}(?:,\d{1,5})*)?)?", re.ASCII)


class RunIdentity(msgspec.Struct, frozen=True):
    """``NAME/NUMBER/SLOTS``, an option of ``train``'s command line."""

    name: str
    """Of the run, the same at each start: what bears it is this run's, whatever clocks say."""
    number: int
    """Of the start, counting those that made a step: 1, 2, ..."""
    slots: tuple[int, ...] = ()
    """Ranks that each host was to get, in the order of the host file; empty: all are on one machine."""

    def __str__(self) -> str:
        return "/".join([self.name, str(self.number), ",".join(map(str, self.slots))])

    @staticmethod
    def parse(text: str) -> "RunIdentity":
        """Raises ValueError."""
        found = _TEXT.fullmatch(text)
        if not found:
            raise ValueError(f'expected NAME/NUMBER, got "{text}"')
        return RunIdentity(found[1], int(found[2]), tuple(map(int, found[3].split(","))) if found[3] else ())

    def misplaced(self, rank: int) -> str | None:
        """What is wrong where mpirun has started other ranks beside this one than the host file asks for; else None."""
        found = os.environ.get(_RANKS_HERE, "")
        if not self.slots or not found.isdigit():  # another MPI
            return None
        wanted = dict(enumerate(count for count in self.slots for _ in range(count))).get(rank, 0)
        return None if int(found) == wanted else f"mpirun has started {found} ranks where the host file asks for {wanted}"
