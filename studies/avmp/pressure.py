"""AVMP's pressure states and its trigger, on a logical clock (AVMP 3.2, Figure 2)."""

import enum
from collections import Counter, deque
from dataclasses import dataclass

from sglang_hybrid.core.errors import ConfigError


class Pressure(enum.IntEnum):
    """What the two pools look like to AVMP."""

    BALANCED = 0
    KV_PRESSURED = 1
    SSM_PRESSURED = 2
    REBALANCING = 3


@dataclass(frozen=True)
class AvmpConfig:
    """AVMP's parameters; the defaults are the paper's configuration `avmp_dynamic_b128`.

    `gated` selects between two descriptions that disagree. True is the text of section 3.2: migrate only if the other
    pool's free fraction is above `threshold_high` and `min_interval_ops` operations have passed. False is the released
    code, which produced the paper's tables: every capacity error that survives an eviction migrates at once.
    """

    threshold_low: float = 0.05
    threshold_high: float = 0.30
    batch_units: int = 128
    min_interval_ops: int = 1000
    gated: bool = False

    def __post_init__(self) -> None:
        if not 0.0 < self.threshold_low < self.threshold_high < 1.0:
            raise ConfigError(f"need 0 < low < high < 1: {self.threshold_low}, {self.threshold_high}")
        if self.batch_units < 1 or self.min_interval_ops < 0:
            raise ConfigError(f"need batch_units >= 1 and min_interval_ops >= 0: {self.batch_units}")


class PressureMonitor:
    """The state machine: counts operations, records transitions, and answers whether a migration may start."""

    def __init__(self, config: AvmpConfig) -> None:
        self.config = config
        self.state = Pressure.BALANCED
        self.operations = 0
        self.throttled = 0
        self.counts: Counter[tuple[Pressure, Pressure]] = Counter()
        self.recent: deque[tuple[int, Pressure, Pressure]] = deque(maxlen=128)
        self._last_start: int | None = None

    def observe(self, kv_free: float, ssm_free: float) -> Pressure:
        """Advance the clock by one operation and move to the state of these free fractions."""
        self.operations += 1
        low, high = self.config.threshold_low, self.config.threshold_high
        if kv_free < low and ssm_free > high:
            self._move(Pressure.KV_PRESSURED)
        elif ssm_free < low and kv_free > high:
            self._move(Pressure.SSM_PRESSURED)
        else:
            self._move(Pressure.BALANCED)
        return self.state

    def start(self, donor_free: float) -> bool:
        """Whether a capacity error may migrate now, the donor being this free; on True the state is REBALANCING."""
        if self.config.gated:
            if donor_free <= self.config.threshold_high:
                return False
            since = self.operations - self._last_start if self._last_start is not None else self.config.min_interval_ops
            if since < self.config.min_interval_ops:
                self.throttled += 1
                return False
        self._last_start = self.operations
        self._move(Pressure.REBALANCING)
        return True

    def _move(self, to: Pressure) -> None:
        if to is not self.state:
            self.counts[self.state, to] += 1
            self.recent.append((self.operations, self.state, to))
            self.state = to
