"""A clock for tests of what measures time: their outcome does not depend on how busy this machine is."""


class Clock:
    """In place of the module ``time``: moves on as it is told (``clock.now += ...``), and by ``tick`` seconds at every look,
    so that what is measured is the number of looks in between."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 0.0, tick

    def _look(self) -> float:
        self.now += self.tick
        return self.now

    monotonic = perf_counter = thread_time = process_time = _look

    def sleep(self, seconds: float) -> None:
        self.now += seconds
