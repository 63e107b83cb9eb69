"""Segments while the model's own head drafts: answers are those of composed prefill, and so is every draft."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.engine.composition import Composition
from tests.engine.drafted import verifications
from tests.engine.prompts import HEAD
from tests.engine.support import Client
from tests.engine.test_segments import ELASTIC, NO_BUFFER, ON, Asker, said

pytestmark = [pytest.mark.engine, pytest.mark.slow]

OVERLAP = ("--hybrid-cpu-event-loop", "overlap")
LITTLE = ("--hybrid-segment-memory-gb", "0.012")
"""For a quarter of the documents below."""
WAYS = {
    "plain": (),
    "overlap": OVERLAP,
    "pages": ("--page-size", "64", "--chunked-prefill-size", "512"),
    "chunks, no_buffer": ("--chunked-prefill-size", "256", *NO_BUFFER),
    "little memory": (*LITTLE, "--chunked-prefill-size", "256"),
    "elastic, overlap": (*ELASTIC, *OVERLAP),
}


@pytest.mark.parametrize("flags", WAYS.values(), ids=WAYS)
def test_drafts_over_segments_are_those_of_composed_prefill(
    serve: Callable[..., Client], compositions: Callable[[str], Composition], flags: tuple[str, ...]
) -> None:
    """A head whose KV of an interior were missing or misplaced would say the same, in other numbers of passes."""
    asker = Asker(serve("reader-gdn", *ON, *HEAD, *flags), compositions("reader-gdn"), seed=5)
    documents = [asker.tokens(n) for n in (64, 90, 100, 150, 200)]
    asked = []
    for lead in (1, 20, 130, 1, 20, 130, 40, 1):
        some = asker.rng.sample(documents, asker.rng.randint(1, 4))
        asked.append(asker.prompt(some, lead, asker.rng.choice([0, 3, 40])))
    asked += [(asker.tokens(n), []) for n in (50, 300)]
    judged: dict[str, set[int]] = {}
    reused = 0
    for turn in range(2):
        ask = partial(asker.ask, tokens=24, salt=str(turn))
        with ThreadPoolExecutor(4) as pool:  # composed and plain ones in a batch
            answers = list(pool.map(ask, *zip(*asked, strict=True)))
        for (prompt, segments), answer in zip(asked, answers, strict=True):
            if (key := str((prompt, answer["output_ids"]))) not in judged:
                states = asker.judge.states([*prompt, *answer["output_ids"]], segments)
                asker.check(prompt, answer, segments, states)
                judged[key] = verifications(asker.judge, prompt, answer["output_ids"], states)
            assert answer["meta_info"]["spec_verify_ct"] in judged[key]
            reused += said(answer).get("segment_tokens", 0)
    assert reused > 1000
