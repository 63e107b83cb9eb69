"""SGLang's own cache tests, as it ships them (from 0.5.21 on), against a server with our components.

Its kit speaks to a large model: words are turned into tokens of the demo vocabulary, and random ids kept inside it.
"""

from __future__ import annotations

import importlib
import random
import re
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine import tree  # noqa: F401 - puts the CPU platform in place before SGLang is imported
from tests.engine.prompts import FIRST, GRID, LAST, STRATEGIES, words
from tests.engine.support import Client

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

WORDS = {word: number for number, word in enumerate(("hi", "this", "here", "that"), FIRST)}

INTERVALS = {"extra_buffer": 256, "no_buffer": 1}
"""Tokens between the states that decoding saves."""


FLAGS = {"extra_buffer": ("--chunked-prefill-size", "8192"), "no_buffer": STRATEGIES["no_buffer"]}
"""With the extra buffer the kit expects that a prompt is computed in one chunk."""


class SmallVocabulary(random.Random):
    """Ids the demo model has, where the kit draws up to 30,000."""

    def randint(self, a: int, b: int) -> int:
        return super().randint(FIRST, LAST) if b > LAST else super().randint(a, b)


@pytest.fixture(scope="module")
def kit() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("sglang.test.kits.unified_radix_cache_kit")
    module.random = SimpleNamespace(Random=SmallVocabulary)
    return module


def test_branching(serve: Callable[..., Client]) -> None:
    """The first and second request miss, the third is served to the branch."""
    mixin = importlib.import_module("sglang.test.kits.prefix_cache_branching_kit").PrefixCacheBranchingMixin
    client = serve("gdn", *FLAGS["extra_buffer"])

    class Kit(mixin):  # type: ignore[misc]
        cache_chunk_size = GRID

        @classmethod
        def flush_cache(cls) -> None:
            client.flush()

        @classmethod
        def send_request_helper(cls, text: str) -> Any:
            ids = [WORDS[word] for word in re.findall("|".join(WORDS), text)]
            return client.post("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}})

    Kit.test_prefix_cache_branching()


@pytest.mark.parametrize("strategy", INTERVALS)
@pytest.mark.parametrize("name", ["prefill_cache_hit_branching", "decode_cache_hit_branching", "logprobs_match"])
def test_multiturn(serve: Callable[..., Client], kit: Any, name: str, strategy: str) -> None:
    """Log-probabilities of cached turns equal those of a replay from an empty cache, branches interleaved."""
    client, rng = serve("gdn", *FLAGS[strategy]), random.Random(41)
    asserts = importlib.import_module("sglang.test.kl_multiturn_utils")

    class Kit(kit.UnifiedRadixTreeTestMixin):  # type: ignore[misc, name-defined]
        base_url, model = client.server.url, "demo"
        input_ids = tuple(words(rng, 512) for _ in range(4))
        num_groups = branches_per_group = 2
        prefix_len, max_new_tokens, kl_threshold = 256, 12, 1e-4
        prefill_cache_assert = staticmethod(asserts.make_mamba_prefill_assert(GRID))
        decode_cache_assert = staticmethod(asserts.make_mamba_decode_assert(INTERVALS[strategy]))

    getattr(Kit(), f"test_multiturn_{name}")()
