"""What a simulated server has: the sizes of its pools, and what SGLang's scheduler takes of them."""

from dataclasses import dataclass

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.prefix.log_schema import SLOTS_PER_PASS


@dataclass(frozen=True)
class Shape:
    """What a server has: `states` slots and `kv_tokens` of KV.

    `grid`: tokens between positions that can be resumed from. `step`: tokens between those of a pass (0: it has one).
    `chunk_tokens`: of a prefill (0: all at once). `buffers`: slots of a running request beside its working state, with
    which the state at the prompt's end is saved (SGLang's extra_buffer; 0 is no_buffer). `track_tokens`: with buffers,
    decoding saves a state every so many tokens. `page`: tokens of KV that are held, matched and evicted as one.
    `pass_states`: free slots that are wanted for each request of a pass (0: as many as it takes).
    """

    states: int
    kv_tokens: int
    grid: int = 64
    step: int = 1
    chunk_tokens: int = 0
    buffers: int = 1
    track_tokens: int = 256
    page: int = 1
    pass_states: int = SLOTS_PER_PASS

    def __post_init__(self) -> None:
        if self.states <= self.wanted_states:
            raise ConfigError(f"a pass takes {self.wanted_states} slots, give the server more: {self.states}")
        if self.kv_tokens <= 0 or self.grid <= 0 or self.step < 0:
            raise ConfigError(f"KV, grid and step count tokens: {self.kv_tokens}, {self.grid}, {self.step}")
        if self.page < 1 or self.grid % self.page or self.chunk_tokens % self.page or self.kv_tokens < self.page:
            raise ConfigError(
                f"give pages that fit in the KV and divide the grid of {self.grid} and chunks of {self.chunk_tokens} "
                f"tokens: {self.page}"
            )

    @property
    def wanted_states(self) -> int:
        """Free slots that are wanted for a request that has none."""
        return self.pass_states or 1 + self.buffers

    def paged(self, tokens: int) -> int:
        """`tokens`, rounded up to whole pages."""
        return -(-tokens // self.page) * self.page
