"""Time to first token as a straight line in the FLOPs left to compute: `overhead_s + seconds_per_flop x FLOPs`.

No queue, no batch: the number orders policies, it does not promise a latency. `4xa100` is fitted to the 638 prefill
times that the Marconi artifact publishes for Jamba-1.5-Mini on four A100-40GB (100 to 31,950 tokens, FLOPs by our
preset; R^2 = 0.9992, median error 7.5 ms). `h100` is stated, not fitted: 989 TFLOP/s dense bf16 at half utilisation,
and 15 ms for scheduling, kernel launches and the first decode.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CostModel:
    """Seconds of a prefill: a fixed overhead and a price per FLOP."""

    overhead_s: float
    seconds_per_flop: float

    def __post_init__(self) -> None:
        if self.overhead_s < 0 or self.seconds_per_flop <= 0:
            raise ConfigError(f"overhead must be >= 0 and the price per FLOP > 0, got {self}")

    def ttft_s(self, model: ModelSpec, n_input: npt.NDArray[np.int64], hits: npt.NDArray[np.int64]) -> Floats:
        """Seconds to the first token per request, shapes (requests,); a full hit still computes one token."""
        start = np.minimum(hits, n_input - 1)
        return self.of(flops(model, n_input, start))

    def of(self, run: Floats) -> Floats:
        """Seconds to the first token of requests that compute so many FLOPs."""
        return self.overhead_s + self.seconds_per_flop * run


def flops(model: ModelSpec, end: npt.NDArray[np.int64], start: npt.NDArray[np.int64]) -> Floats:
    """FLOPs to prefill [start, end) per request, the array form of `ModelSpec.prefill_flops`."""
    return model.prefill_flops(end, start)


H100 = CostModel(overhead_s=0.015, seconds_per_flop=1.0 / (0.5 * 989e12))
A100X4 = CostModel(overhead_s=0.0285, seconds_per_flop=1.0 / 456.6e12)
HARDWARE = {"h100": H100, "4xa100": A100X4}
