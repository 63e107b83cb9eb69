"""What a model costs to cache and to compute: bytes per token, bytes per checkpoint, prefill FLOPs.

Every decision of this package (what to checkpoint, what to evict, how to split memory) is priced with a `ModelSpec`.
`preset(name)` and `from_config(...)` build one; the numbers equal SGLang's own pool sizes (tests/conformance).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sglang_hybrid.core.errors import ConfigError


@dataclass(frozen=True)
class ModelSpec:
    """The cost of one model (or of one tensor-parallel rank of it).

    `prefill_flops(end, start) = flops_per_token*(end - start) + flops_per_token_pair*(end**2 - start**2)`.
    """

    name: str
    kv_bytes_per_token: int
    checkpoint_bytes: int
    flops_per_token: float
    flops_per_token_pair: float
    conv_bytes: int = 0
    chunk_tokens: int = 1

    @property
    def temporal_bytes(self) -> int:
        """Bytes of the recurrent states in a checkpoint, without the convolution windows."""
        return self.checkpoint_bytes - self.conv_bytes

    def prefill_flops(self, end: int, start: int = 0) -> float:
        """FLOPs to prefill tokens [start, end) when [0, start) is cached."""
        return self.flops_per_token * (end - start) + self.flops_per_token_pair * (end**2 - start**2)


def _marconi_7b() -> ModelSpec:
    """The 7B hybrid of the Marconi paper (section 5.1, appendix A): 4 attention, 24 SSM, 28 MLP layers, fp16.

    Its own formulas on purpose, so that results compare with the published ones: D = 4096, N = 128, no GQA, no causal
    half, a state of D*N and a window of 4 x (2D + 2N). The element-wise term is `10LD` as in the artifact; table 1
    prints `10L`.
    """
    d, n, attention, ssm, mlp = 4096, 128, 4, 24, 28
    conv_bytes = ssm * (2 * d + 2 * n) * 4 * 2
    return ModelSpec(
        name="marconi-7b",
        kv_bytes_per_token=attention * 2 * d * 2,
        checkpoint_bytes=ssm * d * n * 2 + conv_bytes,
        flops_per_token=attention * 8.0 * d * d + mlp * 16.0 * d * d + ssm * (12.0 * d * d + 16.0 * d * n + 10.0 * d),
        flops_per_token_pair=attention * 4.0 * d,
        conv_bytes=conv_bytes,
    )


PRESETS: Mapping[str, ModelSpec] = MappingProxyType({spec.name: spec for spec in (_marconi_7b(),)})


def preset(name: str) -> ModelSpec:
    """The spec of a known model; raises ConfigError for an unknown name."""
    try:
        return PRESETS[name]
    except KeyError:
        raise ConfigError(f"unknown model preset, choose one of {', '.join(sorted(PRESETS))}: {name!r}") from None
