"""A clock moved by hand."""


class LogicalClock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        return self._now_s

    def advance(self, by_s: float) -> None:
        assert by_s >= 0, by_s
        self._now_s += by_s
