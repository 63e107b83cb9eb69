"""What `benchmarks/quality/segments.py` composes and counts."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.quality import segments, transitions
from sglang_hybrid.demo.model import READERS
from sglang_hybrid.demo.reader import tokens
from sglang_hybrid.demo.reader.network import delta, ssd
from tests.engine.composition import Composition


def made(delta_rule: bool) -> tuple[Any, list[Tensor]]:
    """A rule, and inputs of 50 tokens."""
    torch.manual_seed(3)
    g, beta = -torch.rand(1, 2, 50), torch.rand(1, 2, 50)
    if delta_rule:
        q, k = torch.randn(1, 2, 50, 8), delta.unit(torch.randn(1, 2, 50, 8))
        return delta.gated_delta_rule, [q, k, torch.randn(1, 2, 50, 6), g, beta]
    return ssd.state_space, [torch.randn(1, 2, 50, 6), torch.randn(1, 1, 50, 8), torch.randn(1, 1, 50, 8), g]


@pytest.mark.parametrize("delta_rule", [True, False])
def test_what_is_added_up_passes_through_no_interior(delta_rule: bool) -> None:
    rule, inputs = made(delta_rule)

    def part(low: int, high: int, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return rule(*(x[:, :, low:high] for x in inputs), state=state)  # type: ignore[no-any-return]

    found, end = segments.adding([(0, 20)])(rule)(*inputs)
    torch.testing.assert_close(found, rule(*inputs)[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(end, rule(*inputs)[1], atol=1e-5, rtol=1e-5)
    found, _ = segments.adding([(10, 20)])(rule)(*inputs)
    before, start = part(0, 10)
    inside, left = part(10, 20)
    rest, _ = part(20, 50, start + left)
    torch.testing.assert_close(found, torch.cat([before, inside, rest], 2), atol=1e-5, rtol=1e-5)
    assert (found - rule(*inputs)[0])[:, :, 10:].abs().max() > 1e-3


def test_documents_are_where_they_are_said_to_be() -> None:
    encoded, ranges = segments.drawn(random.Random(5), 4, 5)
    assert len(ranges) == 4
    texts = [tokens.load().decode(encoded.ids[low:high], skip_special_tokens=False) for low, high in ranges]
    assert all(text.startswith(tokens.DOCUMENT) and text.count(tokens.DOCUMENT) == 1 for text in texts)
    assert max(high for _, high in ranges) < encoded.answers[0][1]


@pytest.mark.parametrize("model", READERS)
def test_every_row_judges_the_same_answers(model: str) -> None:
    rows = list(segments.cells(model, 8, 5, 1))
    assert [row["composition"] for row in rows] == [
        "full",
        "seams 0",
        "seams 4",
        "seams 8",
        "seams 16",
        "addition",
        "context",
    ]
    assert len({row["questions"] for row in rows}) == 1
    assert rows[0]["kl"] == 0.0
    assert all(row["kl"] > 1e-6 for row in rows[1:])


def test_full_is_the_network_itself() -> None:
    encoded, _ = segments.drawn(random.Random(6), 2, 5)
    judge, first = Composition("reader-gdn"), encoded.answers[0][1]
    keep = torch.zeros(1, len(encoded.ids), dtype=torch.bool)
    keep[0, first - 1 : -1] = True
    with torch.no_grad():
        wanted = judge.network(torch.tensor([encoded.ids]), keep).log_softmax(-1)
    found = segments._logprobs(judge, encoded.ids, first, [], "full")
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model", READERS)
def test_the_first_segment_in_its_context_is_the_prompt_itself(model: str) -> None:
    encoded, ranges = segments.drawn(random.Random(7), 2, 5)
    judge, first = Composition(model), encoded.answers[0][1]
    whole = segments._logprobs(judge, encoded.ids, first, [], "full")
    found = segments._logprobs(judge, encoded.ids, first, ranges[:1], segments.CONTEXT)
    torch.testing.assert_close(found, whole, atol=1e-3, rtol=1e-3)
    alone = segments._logprobs(judge, encoded.ids, first, ranges[:1], "seams 8")
    assert (alone - whole).abs().max() > 1e-2


def test_the_largest_element_of_a_transition_is_that_of_its_product() -> None:
    _, inputs = made(True)
    _, k, v, g, beta = inputs
    product = torch.eye(8).repeat(2, 1, 1)
    for at in range(50):
        key = k[0, :, at]
        step = torch.eye(8) - beta[0, :, at, None, None] * key[:, :, None] * key[:, None, :]
        product = product @ (g[0, :, at].exp()[:, None, None] * step)
    found = transitions.largest(k, v, g, beta)
    torch.testing.assert_close(found, product.abs().amax((1, 2)), atol=1e-12, rtol=1e-4)
