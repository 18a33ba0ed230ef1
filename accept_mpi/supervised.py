"""What ``launch`` tells the ranks of a run that it begins, and begins again."""

import msgspec


class Supervised(msgspec.Struct, frozen=True):
    """``BEGAN/NAME/NUMBER``, an option of ``train``'s command line."""

    began: str
    """When the supervisor began (UTC, as a manifest has it): checkpoints made since then are this run's."""
    name: str
    """Of the run, the same at each start."""
    number: int
    """Of the start, counting those that made a step: 1, 2, ..."""

    def __str__(self) -> str:
        return f"{self.began}/{self.name}/{self.number}"

    @staticmethod
    def parse(text: str) -> "Supervised":
        """Raises ValueError."""
        began, name, number = text.split("/")
        return Supervised(began, name, int(number))
