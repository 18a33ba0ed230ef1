"""The two directions in which messages cross the boundary between two stages."""

import enum


class Direction(enum.IntEnum):
    """Direction of a message across a boundary. The number stands in messages and logs."""

    FORWARD = 0
    """Activations, to the next stage."""
    BACKWARD = 1
    """Gradients, to the previous stage."""

    @staticmethod
    def of(kind: str) -> "Direction":
        """Direction of the message that an action (``kind``: F, E or B) waits for, and of the one that it sends."""
        return Direction.BACKWARD if kind == "B" else Direction.FORWARD

    @property
    def tensors(self) -> str:
        """What the messages hold, in a word."""
        return ("activations", "gradients")[self]

    def ends(self, boundary: int) -> tuple[int, int]:
        """The stages that send and that receive messages of this direction across ``boundary``."""
        return (boundary + self, boundary + 1 - self)

    def __str__(self) -> str:
        return self.name.lower()


Crossing = tuple[int, Direction]
"""A boundary and a direction: boundary b lies between stages b and b + 1."""
