"""What sums of losses are divided by, where the number of targets that count is known only after the step's last forward."""


class Divisors:
    """Divisors of summed losses, by step: an estimate, until everything that counts in a step is known."""

    def __init__(self) -> None:
        self._assumed: dict[int, float] = {}
        self._counted: dict[int, float] = {}

    @property
    def used(self) -> bool:
        """True if a loss was summed."""
        return bool(self._assumed)

    def share(self, step: int, count: float, samples: int, share: float) -> float:
        """Factor for the loss sum of a micro-batch in which ``count`` counts, and whose samples are ``share`` of the step's.
        The step's other micro-batches are assumed to count as much as its first."""
        for old in [known for known in self._assumed if known < step - 1]:
            del self._assumed[old], self._counted[old]
        assumed = self._assumed.setdefault(step, (count or samples) / share)
        self._counted[step] = self._counted.get(step, 0.0) + count
        return 1 / assumed

    def scale(self, step: int) -> float:
        """Factor by which the step's gradients must be multiplied, as far as it is known."""
        if step not in self._assumed:
            return 1.0
        return self._assumed[step] / self._counted[step] if self._counted[step] else 0.0
