"""What ``launch`` tells the ranks of a run that it begins, and begins again."""

import re

import msgspec


class Supervised(msgspec.Struct, frozen=True):
    """``NAME/NUMBER``, an option of ``train``'s command line."""

    name: str
    """Of the run, the same at each start: what bears it is this run's, whatever clocks say."""
    number: int
    """Of the start, counting those that made a step: 1, 2, ..."""

    def __str__(self) -> str:
        return f"{self.name}/{self.number}"

    @staticmethod
    def parse(text: str) -> "Supervised":
        """Raises ValueError."""
        found = re.fullmatch(r"([\w-]{1,100})/(\d{1,9})", text, re.ASCII)
        if not found:
            raise ValueError(f'expected NAME/NUMBER, got "{text}"')
        return Supervised(found[1], int(found[2]))
