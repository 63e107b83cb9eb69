"""The readers' world: what evaluation asks was never seen, and every answer is what the documents say."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from sglang_hybrid.demo import conversation as quickstart
from sglang_hybrid.demo.reader import conversations, evaluation, forms, names, questions, relations, talk, tokens
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


LISTS = {
    "said": (forms.OPENINGS, [forms.clauses_of(relation) for relation in relations.RELATIONS]),
    "changed": (forms.CHANGE_OPENINGS, [forms.clauses_of(relation) for relation in relations.RELATIONS]),
    "has changed": (forms.OPENINGS, [forms.CHANGED]),
    "again": (forms.OPENINGS, [forms.AGAIN]),
    "direct": (forms.ASK, [forms.DIRECT + tuple(wh[0] for wh in one.asked) for one in relations.RELATIONS]),
    "indirect": (
        forms.ASK_INDIRECT,
        [forms.INDIRECT + tuple(wh[1] for wh in one.asked) for one in relations.RELATIONS],
    ),
    "thing": (forms.ASK_THING, [forms.THINGS]),
    "that": (forms.ASK_THAT, [forms.clauses_of(relation) for relation in relations.RELATIONS]),
    "is it": (forms.ASK, [forms.IS_IT]),
    "which": (forms.ASK, [forms.WHICH]),
    "same entity": (forms.ASK_ON, [forms.SAME_ENTITY]),
    "same relation": (forms.ASK_ON, [forms.SAME_RELATION]),
    "family": (forms.ASK_ON, [forms.FAMILY]),
}


@pytest.mark.parametrize("name", LISTS)
def test_training_sees_every_opening_and_every_clause_but_not_every_pair(name: str) -> None:
    openings, lists = LISTS[name]
    for clauses in lists:
        assert len(set(openings)) == len(openings)
        assert len(set(clauses)) == len(clauses)
        pairs = [(o, c) for o in range(len(openings)) for c in range(len(clauses))]
        seen = [pair for pair in pairs if forms.belongs(TRAIN, *pair)]
        assert {o for o, _ in seen} == set(range(len(openings)))
        assert {c for _, c in seen} == set(range(len(clauses)))
        assert 0.1 < 1 - len(seen) / len(pairs) < 0.3


def test_no_held_out_form_is_drawn_for_training() -> None:
    rng = random.Random(4)
    drawn = {
        split: {forms.pair(rng, split, forms.OPENINGS, forms.SAID) for _ in range(3000)} for split in (TRAIN, HELD)
    }
    assert not drawn[TRAIN] & drawn[HELD]
    assert len(drawn[TRAIN] | drawn[HELD]) == len(forms.OPENINGS) * len(forms.SAID)
    said = {split: {talk.turn(rng, split)[0] for _ in range(6000)} for split in (TRAIN, HELD)}
    assert not {text for text in said[TRAIN] & said[HELD] if text.split()[0] in ("Hello,", "Thanks,", "Goodbye,")}


def test_a_value_comes_after_its_entity() -> None:
    for relation in relations.RELATIONS:
        for clause in (*forms.clauses_of(relation), *forms.CHANGED):
            assert 0 <= clause.index("{E}") < clause.index("{V}")
        assert all("{E}" in text and "{V}" not in text for wh in relation.asked for text in wh)


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
                    assert turn.text.endswith("yes.") == bool(re.search(rf"\b{re.escape(fact.value)}\b", turn.question))
            elif turn.kind == questions.WHICH:
                number = int(re.findall(r"\d+", turn.text)[-1])
                assert turn.entity is not None
                assert turn.entity.text.split()[1] in told[number] or turn.entity.kind == "person"
            elif turn.kind == questions.ABSENT:
                assert turn.entity is not None
                assert turn.text.endswith(f"of {turn.entity.text} is not given: the documents do not say.")
                noun = re.findall(r"[Tt]he ([a-z ]+) of ", turn.text)[-1]
                assert (turn.entity.text, noun) not in made.world.facts
    assert kinds >= {questions.ONE, questions.ABSENT, questions.YES_NO, questions.WHICH, questions.TALK}
    if shape.documents == 8:
        assert kinds == set(questions.ALL)


def test_evaluation_conversations_have_the_length_they_are_asked_for() -> None:
    for length, turns in ((512, 8), (2048, 20), (8192, 32)):
        sizes = [len(encode(evaluation.held_out(random.Random(seed), length, turns)).ids) for seed in range(3)]
        assert all(0.75 * length < size < 1.25 * length for size in sizes), sizes


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
    assert set(lengths) == {2}


def test_the_tokenizer_is_what_its_command_makes(tmp_path: Path) -> None:
    assert tokens.main([str(tmp_path / "tokenizer.json")]) == 0
    committed = Path(tokens.__file__).with_name("tokenizer.json")
    assert (tmp_path / "tokenizer.json").read_text() == committed.read_text()


@pytest.mark.parametrize("arguments", [["--help"], ["a", "b"], ["no/such/folder/tokenizer.json"]])
def test_the_tokenizer_command_says_what_is_wrong_in_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tokens.main(arguments) != 0
    assert capsys.readouterr().err.count("\n") == 1


def test_the_quickstart_speaks_the_language_with_names_that_training_never_saw() -> None:
    tokenizer = tokens.load()
    known = {piece for text in tokens.text(400) for piece in tokenizer.encode(text).tokens}
    asked = [question for turns in quickstart.CONVERSATIONS for question, _ in turns]
    assert {piece for text in (quickstart.SYSTEM_PROMPT, *asked) for piece in tokenizer.encode(text).tokens} <= known
    held = {head + tail for head in names.HEADS for tail in names.TAILS} & set(
        re.findall(r"\w+", quickstart.SYSTEM_PROMPT)
    )
    rng = random.Random(5)
    assert len(held) >= 8
    assert not held & {names.name(rng, TRAIN) for _ in range(20_000)}


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
