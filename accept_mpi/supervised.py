"""What ``launch`` tells the ranks of a run that it begins, and begins again."""

import os

import msgspec

_RANKS_HERE = "OMPI_COMM_WORLD_LOCAL_SIZE"


class Supervised(msgspec.Struct, frozen=True):
    """``BEGAN/NAME/NUMBER/SLOTS``, an option of ``train``'s command line."""

    began: str
    """When the supervisor began (UTC, as a manifest has it): checkpoints made since then are this run's."""
    name: str
    """Of the run, the same at each start."""
    number: int
    """Of the start, counting those that made a step: 1, 2, ..."""
    slots: tuple[int, ...] = ()
    """Ranks that each host was to get, in the order of the host file; empty: all are on one machine."""

    def __str__(self) -> str:
        return "/".join([self.began, self.name, str(self.number), ",".join(map(str, self.slots))])

    @staticmethod
    def parse(text: str) -> "Supervised":
        """Raises ValueError."""
        began, name, number, *more = text.split("/", 3)
        slots = tuple(int(count) for count in more[0].split(",")) if more and more[0] else ()
        return Supervised(began, name, int(number), slots)

    def misplaced(self, rank: int) -> str | None:
        """What is wrong where mpirun has started other ranks beside this one than the host file asks for; else None."""
        found = os.environ.get(_RANKS_HERE, "")
        if not self.slots or not found.isdigit():  # another MPI
            return None
        wanted = dict(enumerate(count for count in self.slots for _ in range(count))).get(rank, 0)
        return None if int(found) == wanted else f"mpirun has started {found} ranks where the host file asks for {wanted}"
