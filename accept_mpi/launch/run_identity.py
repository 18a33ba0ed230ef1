"""The identity that ``launch`` gives to a run, at its first start and at each restart."""

import os
import re

import msgspec

_RANKS_HERE = "OMPI_COMM_WORLD_LOCAL_SIZE"
# The name becomes a folder's, so it must not contain a path.
_TEXT = re.compile(r"([\w-]{1,100})/(\d{1,9})(?:/(\d{1,5}(?:,\d{1,5})*)?)?", re.ASCII)


class RunIdentity(msgspec.Struct, frozen=True):
    """A run and one of its starts: ``NAME/NUMBER/SLOTS`` on ``train``'s command line (option ``--run``)."""

    name: str
    """Name of the run, the same at each start, by which its files are recognized regardless of clocks."""
    number: int
    """Number of the start: 1 plus the number of earlier starts that made a step."""
    slots: tuple[int, ...] = ()
    """Ranks that each host should get, in the order of the host file; empty if all are on one machine."""

    def __str__(self) -> str:
        return "/".join([self.name, str(self.number), ",".join(map(str, self.slots))])

    @staticmethod
    def parse(text: str) -> "RunIdentity":
        """Parse ``NAME/NUMBER/SLOTS``. Raises ValueError."""
        found = _TEXT.fullmatch(text)
        if not found:
            raise ValueError(f'expected NAME/NUMBER, got "{text}"')
        return RunIdentity(found[1], int(found[2]), tuple(map(int, found[3].split(","))) if found[3] else ())

    def misplaced(self, rank: int) -> str | None:
        """An error text if mpirun started another number of ranks on this rank's host than the host file asks for, else
        None."""
        found = os.environ.get(_RANKS_HERE, "")
        if not self.slots or not found.isdigit():  # another MPI
            return None
        wanted = dict(enumerate(count for count in self.slots for _ in range(count))).get(rank, 0)
        return None if int(found) == wanted else f"mpirun has started {found} ranks where the host file asks for {wanted}"
