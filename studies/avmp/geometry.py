"""Cache geometries of the AVMP evaluation: bytes of a KV page and of a state block, per layer.

Source: AVMP (arXiv 2605.22416) sections 3.1 and 4.1; both models are 32 layers, 4 attention and 28 recurrent, bf16.
"""

from dataclasses import dataclass

from sglang_hybrid.core.errors import ConfigError

KV = 0
STATE = 1
SLAB_ALIGNMENT_BYTES = 128
PAGE_ALIGNMENT_BYTES = 16


def align_up(size_bytes: int, alignment_bytes: int) -> int:
    """The smallest multiple of `alignment_bytes` that is >= `size_bytes` (AVMP 3.1: 128 B slabs, 16 B pages)."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes


@dataclass(frozen=True)
class Geometry:
    """Sizes of one model's cache in the units the paper allocates: one KV page or one state block of one layer."""

    name: str
    state_block_bytes: int
    kv_page_bytes: int = 16 * 2 * 8 * 128 * 2
    page_tokens: int = 16
    kv_layers: int = 4
    state_layers: int = 28

    def __post_init__(self) -> None:
        for size_bytes in (self.state_block_bytes, self.kv_page_bytes):
            if size_bytes <= 0 or size_bytes % PAGE_ALIGNMENT_BYTES:
                raise ConfigError(f"round the unit up to {PAGE_ALIGNMENT_BYTES} bytes with align_up: {size_bytes}")

    def unit_bytes(self, kind: int) -> int:
        """Bytes of one allocation unit: a KV page of one layer (kind KV) or a state block of one layer (kind STATE)."""
        return self.kv_page_bytes if kind == KV else self.state_block_bytes

    def pages(self, tokens: int) -> int:
        """KV pages of one layer that hold `tokens` tokens; at least one."""
        return max(1, -(-tokens // self.page_tokens))

    def request_bytes(self, tokens: int) -> int:
        """Bytes of a request of `tokens` tokens: KV pages in every attention layer, a state per recurrent layer."""
        kv_bytes = self.pages(tokens) * self.kv_layers * self.kv_page_bytes
        return kv_bytes + self.state_layers * self.state_block_bytes


GEOMETRIES = {
    "jamba_1_5_mini": Geometry("jamba_1_5_mini", state_block_bytes=8192 * 16 * 2),
    "mamba2_1b3": Geometry("mamba2_1b3", state_block_bytes=8192 * 128 * 2),
}
