"""The readers' world: what evaluation asks was never seen, and every answer is what the documents say."""

from __future__ import annotations

import random
import re

import pytest

from sglang_hybrid.demo.reader import conversations, evaluation, names, questions, relations, tokens
from sglang_hybrid.demo.reader.documents import Shape
from sglang_hybrid.demo.reader.examples import encode
from sglang_hybrid.demo.reader.names import HELD, TRAIN

SHAPES = [Shape(documents, filler=filler) for documents in (1, 3, 8) for filler in (0.0, 1.0)]


def drawn(seed: int, shape: Shape, turns: int = 12) -> conversations.Conversation:
    return conversations.draw(random.Random(seed), shape, turns)


def test_names_of_training_and_evaluation_have_nothing_in_common() -> None:
    rng = random.Random(1)
    seen = {split: {names.name(rng, split) for _ in range(4000)} for split in (TRAIN, HELD)}
    assert len(seen[TRAIN]) > 800
    assert len(seen[HELD]) > 200
    assert not seen[TRAIN] & seen[HELD]


def test_forms_of_training_and_evaluation_have_nothing_in_common() -> None:
    every = [relations.SAID, relations.CHANGED, relations.AGAIN, relations.ASKED, relations.ASKED_NOW]
    every += [forms for relation in relations.RELATIONS for forms in (relation.said, relation.asked)]
    every += [questions.WHICH_FORMS, questions.YES_NO_FORMS, questions.HOPS_FORMS]
    every += [questions.SAME_ENTITY, questions.SAME_RELATION]
    for forms in every:
        assert forms[TRAIN]
        assert forms[HELD]
        assert not set(forms[TRAIN]) & set(forms[HELD])


def test_the_same_seed_draws_the_same_conversation() -> None:
    assert [drawn(3, shape).messages() for shape in SHAPES] == [drawn(3, shape).messages() for shape in SHAPES]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.documents} documents, filler {shape.filler}")
def test_answers_are_what_the_documents_say(shape: Shape) -> None:
    kinds = set()
    for seed in range(60):
        made = drawn(seed, shape)
        told = dict(made.world.documents)
        for fact in made.world.facts.values():
            assert fact.value in told[fact.document]
        for turn in made.turns:
            kinds.add(turn.kind)
            if turn.kind in (questions.ONE, questions.NOW, questions.YES_NO):
                assert turn.entity is not None
                assert turn.relation is not None
                fact = made.world.facts[turn.entity.text, turn.relation.noun]
                assert fact.changed or turn.kind != questions.NOW
                assert f"is {fact.value}" in turn.text
                if turn.kind == questions.YES_NO:
                    assert turn.text.endswith("yes.") == (fact.value in turn.question)
            elif turn.kind == questions.WHICH:
                number = int(re.findall(r"\d+", turn.text)[-1])
                assert turn.entity is not None
                assert turn.entity.text.split()[1] in told[number] or turn.entity.kind == "person"
            elif turn.kind == questions.ABSENT:
                assert turn.entity is not None
                assert turn.relation is not None
                assert (turn.entity.text, turn.relation.noun) not in made.world.facts
                assert turn.text.endswith("the documents do not say.")
    assert kinds >= {questions.ONE, questions.ABSENT, questions.YES_NO, questions.WHICH, questions.TALK}
    if shape.documents == 8:
        assert kinds == set(questions.ALL)


def test_evaluation_conversations_have_the_length_they_are_asked_for() -> None:
    for length, turns in ((512, 8), (2048, 20), (8192, 32)):
        sizes = [len(encode(evaluation.held_out(random.Random(seed), length, turns)).ids) for seed in range(3)]
        assert all(0.7 * length < size < 1.15 * length for size in sizes), sizes


@pytest.mark.parametrize(
    "text",
    ["The gate code is 4821.", "Grüße, 你好, مرحبا 👩‍🚀!", "\x00\t\r\n  tabs", "<|doc|> <|end|>", "a" * 999, ""],
)
def test_any_text_round_trips(text: str) -> None:
    tokenizer = tokens.load()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_digits_are_single_and_names_of_two_pieces() -> None:
    tokenizer = tokens.load()
    assert [piece.strip("Ġ") for piece in tokenizer.encode(" 48215").tokens] == list("48215")
    rng = random.Random(2)
    lengths = [len(tokenizer.encode(" " + names.name(rng, split)).ids) for split in (TRAIN, HELD) for _ in range(300)]
    assert lengths.count(2) > 0.9 * len(lengths)
    assert 1 not in lengths


def test_pieces_are_tokenised_as_the_whole_text_is() -> None:
    tokenizer = tokens.load()
    for seed in range(40):
        made = drawn(seed, SHAPES[seed % len(SHAPES)])
        whole = "".join(text for text, _ in conversations.pieces(made))
        encoded = encode(made)
        assert encoded.ids == tokenizer.encode(whole).ids
        assert [tokenizer.decode(encoded.ids[start : end - 1]) for _, start, end in encoded.answers] == [
            turn.text for turn in made.turns
        ]
        assert all(encoded.ids[end - 1] == tokens.special_id(tokens.END) for _, _, end in encoded.answers)


def test_the_chat_template_writes_what_training_read() -> None:
    from jinja2 import Template

    for seed in range(5):
        made = drawn(seed, SHAPES[2])
        whole = "".join(text for text, _ in conversations.pieces(made))
        assert Template(tokens.CHAT_TEMPLATE).render(messages=made.messages()) == whole


def test_intervals_are_wilsons() -> None:
    low, high = evaluation.interval(95, 100)
    assert (round(low, 3), round(high, 3)) == (0.888, 0.978)
    assert evaluation.interval(0, 0) == (0.0, 1.0)
    assert evaluation.interval(10, 10)[1] == 1.0
