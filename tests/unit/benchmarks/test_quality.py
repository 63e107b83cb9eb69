"""What `benchmarks/quality` asks and counts, and that an exact state changes nothing."""

from __future__ import annotations

import random

import pytest
import torch

from benchmarks.quality import questions, states
from benchmarks.quality.recurrences import replaced
from sglang_hybrid.demo.reader import evaluation, tokens
from sglang_hybrid.demo.reader.examples import encode
from sglang_hybrid.demo.reader.names import HELD
from sglang_hybrid.demo.reader.network import models


def test_what_is_asked_is_what_the_model_alone_is_judged_by() -> None:
    asked = questions.asked(512, 3)
    assert {kind: [0, count] for kind, (_, count) in questions.counted(asked, ([] for _ in asked)).items()} == {
        kind: [0, sum(turn.kind == kind for made in evaluation.drawn(512, HELD, 3) for turn in made.turns)]
        for kind in {question.kind for question in asked}
    }
    assert questions.counted(asked, (question.answer for question in asked)) == {
        kind: [len(same), len(same)]
        for kind in {question.kind for question in asked}
        if (same := [question for question in asked if question.kind == kind])
    }
    tokenizer = tokens.load()
    for question in asked:
        assert tokenizer.decode(question.prompt, skip_special_tokens=False).endswith(tokens.ASSISTANT)
        assert question.answer[-1] == tokens.special_id(tokens.END)


@pytest.mark.parametrize("documents", [2, 10, 40])
def test_so_many_documents_are_told_in_about_so_many_tokens(documents: int) -> None:
    sizes = []
    for seed in range(4):
        made = evaluation.held_out(random.Random(seed), 2048, 20, documents=documents)
        assert len(made.world.documents) == documents
        sizes.append(len(encode(made).ids))
    assert 0.8 * 2048 < sum(sizes) / len(sizes) < 1.2 * 2048


@pytest.mark.parametrize("model", models.READERS)
def test_states_are_rounded_where_a_conversation_resumes(model: str) -> None:
    network = models.READERS[model](tokens.VOCABULARY)
    models.initialise(network, torch.Generator().manual_seed(2))
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))
    ids = encode(evaluation.held_out(random.Random(2), 300, 3)).ids
    cuts = states.ends(ids)
    assert cuts[0] > 100, "there is something before the first cut"
    assert all(ids[cut - 1] == tokens.special_id(tokens.END) for cut in cuts)
    read, found = torch.tensor([ids]), {}
    with torch.no_grad():
        plain = network(read)
        for name, rounded in states.ROUNDED.items():
            with replaced(network, states.resuming(rounded, cuts)):
                found[name] = network(read)
        torch.testing.assert_close(network(read), plain)
    torch.testing.assert_close(found["float32"], plain, atol=1e-4, rtol=1e-4)
    away = {name: (logits - plain).abs()[0, cuts[0] :].mean().item() for name, logits in found.items()}
    assert away["float32"] < away["int8"] < away["int4"] < away["none"]
    assert away["float32"] < away["bfloat16"] < away["float8_e4m3"] < away["none"]
    assert all(torch.equal(logits[0, : cuts[0] - 16], plain[0, : cuts[0] - 16]) for logits in found.values())


def test_integers_keep_the_largest_and_round_the_rest() -> None:
    state = torch.tensor([[[[1.0, -127.0, 0.4], [0.0, 0.0, 0.0]]]])
    assert states.integers(8)(state).tolist() == [[[[1.0, -127.0, 0.0], [0.0, 0.0, 0.0]]]]
