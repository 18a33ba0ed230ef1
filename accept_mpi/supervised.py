"""What ``launch`` tells the ranks of a run that it begins, and begins again."""

import re

import msgspec

# A name becomes a folder's, so it may lead nowhere else.
_TIME, _NAME, _NUMBER = (re.compile(p, re.ASCII) for p in (r"[0-9T:.+Z-]{1,64}", r"\w[\w.-]{0,200}", r"\d{1,9}"))


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
        if not (_TIME.fullmatch(began) and _NAME.fullmatch(name) and _NUMBER.fullmatch(number)):
            raise ValueError(f'"{text}" is no BEGAN/NAME/NUMBER')
        return Supervised(began, name, int(number))
