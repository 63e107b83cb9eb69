"""A request that a simulated server runs."""

from dataclasses import dataclass, field

from sglang_hybrid.prefix.request import Request
from sglang_hybrid.prefix.reuse.hints import NO_HINTS, Hints
from sglang_hybrid.prefix.tree.node import Node
from sglang_hybrid.prefix.tree.tokens import Tokens


@dataclass
class Running:
    """A request that holds memory: `tokens` are its prompt, `own_tokens` of KV and `slots` are not in the tree."""

    id: str
    tokens: Tokens
    namespace: str | None
    boundaries: tuple[int, ...]
    limit: int
    key: Tokens  # of the tree, whole pages
    hints: Hints = NO_HINTS
    request: Request | None = None
    held: Node | None = None
    cached_tokens: int = 0
    kv_tokens: int = 0
    computed: int = 0
    own_tokens: int = 0
    slots: int = 0
    tip: Node | None = None
    promised: int = 0  # tokens of prompt and answer, at most
    planned: dict[int, int] = field(default_factory=dict)  # positions of the last pass, and what each was wanted for
    tail: int = 0  # where SGLang saves a state of the last pass by itself
    decodes: bool = False
    copies: bool = False  # the state of `held`, which cannot be evicted until then
