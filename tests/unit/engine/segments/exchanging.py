"""Schedulers that hand each other entries, with entries whose bytes are drawn."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from sglang_hybrid.core.models import find_model
from sglang_hybrid.engine.frontend.segments import endpoint
from sglang_hybrid.engine.segments.exchange import Exchange
from sglang_hybrid.engine.segments.listing import Births
from sglang_hybrid.engine.segments.settling import Settling
from sglang_hybrid.engine.segments.store import Shapes, Store
from sglang_hybrid.segment.geometry import Seams
from sglang_hybrid.segment.index import Costs, Entry, SegmentIndex
from sglang_hybrid.segment.keys import Identity

CPU = torch.device("cpu")
SHAPES = Shapes(3, (4, 8, 8), (40, 3), torch.bfloat16, True, 2, 2, 16, 12, torch.float16)
TOKENS = 70
IDS = list(range(100, 100 + TOKENS + 16))


class Composer:
    """As much of one as an exchange needs, with entries whose bytes are drawn."""

    def __init__(self, store: Store, ahead: int = 0) -> None:
        self.store, self.seams, self.births, self.time = store, Seams(8, 3), Births(), 5.0
        costs = Costs(find_model("qwen3-next-80b-a3b"), store.state_bytes, store.token_bytes, 1, store.transitions, 1)
        self.index = SegmentIndex(store.blocks, costs)
        self.identity, self.served = Identity("a path of its own", 8, 8), SimpleNamespace(mode="transition", most=4096)
        self.settling = Settling(self.index, ahead, None)
        self.told = 0

    def now(self) -> float:
        return self.time

    def tell(self) -> None:
        self.told += 1

    def make(self, ids: Sequence[int], stays: int, seed: int = 0) -> Entry:
        """An entry with random bytes, of whose transitions every `stays`-th does not vanish."""
        store, drawn = self.store, torch.Generator().manual_seed(seed)
        key = self.identity.key(array("q", ids))
        mark = self.index.sight(key, self.time)
        entry = self.index.admit(key, len(ids) - 16, mark, self.time)
        assert entry is not None
        slots = torch.from_numpy(entry.transitions)

        def bytes_of(*size: int) -> torch.Tensor:
            return torch.randint(0, 256, size, generator=drawn, dtype=torch.uint8)

        store.state_data[entry.block] = bytes_of(store.state_bytes)
        for slot in entry.slots.tolist():
            store.token_data[slot] = bytes_of(store.token_bytes)
        kept = 0
        for number, layer in enumerate(store.layers):
            if layer.transition_rows is None:
                continue
            for head in range(4):
                stay = (4 * number + head) % stays == 0
                layer.transition_rows[entry.block, head] = slots[kept] if stay else -1
                if stay:
                    store.transition_data[slots[kept]] = bytes_of(store.transition_bytes)
                kept += stay
        entry.making = False
        self.births.made(entry, self.time, None, [])
        self.settling.launched([entry], torch.tensor([kept]))
        self.settling.turn()
        self.index.unpin(entry)
        return entry

    def read(self, entry: Entry) -> list[bytes]:
        """All that a composed pass could read of an entry, field by field."""
        store, found = self.store, []
        for layer in store.layers:
            for name in ("end_state", "window", "end_state_scale"):
                if (field := getattr(layer, name)) is not None:
                    found.append(field[entry.block].contiguous().view(torch.uint8).numpy().tobytes())
            if layer.transition_rows is None:
                found.append(layer.transition[entry.block].numpy().tobytes())
                continue
            for row in layer.transition_rows[entry.block].tolist():
                found.append(b"" if row < 0 else store.transition_data[row].numpy().tobytes())
        planes = [*store.kv.keys, *store.kv.values, *store.head_kv.keys, *store.head_kv.values]
        slots = torch.from_numpy(entry.slots)
        return [*found, *(plane[slots].contiguous().view(torch.uint8).numpy().tobytes() for plane in planes)]


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3).to(torch.bfloat16))


def exchange(composer: Composer, weights: torch.nn.Module | None = None, group: Any = None) -> Exchange:
    return Exchange(composer, weights or model(), group)  # type: ignore[arg-type]


def static(shapes: Shapes = SHAPES, dtype: str = "float32") -> Composer:
    return Composer(Store(shapes, dtype, 400_000, CPU))


def application(manager: Any) -> FastAPI:
    """SGLang's application as far as segments go: `manager` is its tokenizer manager, and a ValueError is a 400."""
    made = FastAPI()
    made.state.openai_serving_chat = SimpleNamespace(tokenizer_manager=manager)
    made.exception_handler(ValueError)(lambda _, error: JSONResponse({"message": str(error)}, 400))
    endpoint.open_routes(made, {"type": "http"})
    return made
