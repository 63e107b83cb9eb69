"""The tokens of a text that is cut are those of the whole, and what was tokenised once is not again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.frontend.tokenization import texts, token_cache
from sglang_hybrid.engine.frontend.tokenization.token_cache import PIECE, TokenCache, cuts

WORDS = ["the", "State", " of", "a", "  ", "\n", "\n\n", "12", "345", "é", "e\u0301", "ﬁ", "漢字", "🙂"]
WORDS += ["'s", "_x", "<|", "|>"]
MARKS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<tool>", "[END]", "word", "<|im_end|>>", "<mask>", "<low>"]
MARKS += ["<to", "<only>", "<left>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>[END]<tool></s>{% endfor %}"
TEMPLATE += "word<only><left>"
MANY = [f"<{number}>" for number in range(99)]
SPLIT = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _bytes(prefix: bool = False, normalizer: Any = None) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.normalizer = normalizer
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), level])
    return _trained(made, trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))


def _sentencepiece(scheme: str) -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    return _trained(made, trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"]))


def _llama() -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _trained(made, trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"]))


def _unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    return _trained(made, trainers.UnigramTrainer(vocab_size=120, special_tokens=["<unk>"], unk_token="<unk>"))


def _wordpiece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return _trained(made, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["<unk>"]))


def _trained(made: Tokenizer, trainer: Any) -> Tokenizer:
    trainer.show_progress = False
    made.train_from_iterator([_text(random.Random(seed), 200, WORDS) for seed in range(20)], trainer)
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": _bytes,
    "byte level, composed": lambda: _bytes(normalizer=normalizers.NFC()),
    "byte level, prefix space": lambda: _bytes(prefix=True),
    "metaspace, first": lambda: _sentencepiece("first"),
    "metaspace, always": lambda: _sentencepiece("always"),
    "prepend": _llama,
    "unigram": _unigram,
    "wordpiece": _wordpiece,
}


def _text(rng: random.Random, parts: int, of: list[str]) -> str:
    return "".join(rng.choices(of, k=parts))


def wrapped(made: Tokenizer, **options: Any) -> Any:
    special = [AddedToken(text, normalized=False, special=True) for text in MARKS[:6] if text != "<tool>"]
    made.add_special_tokens(special)
    made.add_tokens(
        [
            AddedToken("<tool>", normalized=False),
            AddedToken("word", normalized=False, single_word=True),
            AddedToken("<|im_end|>>", normalized=False),
            AddedToken("<to", normalized=False),
            AddedToken("<mask>", normalized=False, lstrip=True, rstrip=True),
            AddedToken("<low>", normalized=True),
            AddedToken("<only>", normalized=False, single_word=True),
            AddedToken("<left>", normalized=False, lstrip=True),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE, eos_token="</s>", **options)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_of_the_pieces_are_those_of_the_text(kind: str) -> None:
    tokenizer = wrapped(KINDS[kind]())
    cache = token_cache._cache(tokenizer)
    assert cache is not None
    assert set(cache._cuts) == {"<|im_start|>", "</s>", "<tool>", "[END]"}
    rng = random.Random(kind)
    for trial in range(150):
        small = TokenCache(cache._cuts, piece=rng.choice([1, 2, 5, 40]))
        text = _text(rng, rng.randrange(40), WORDS + MARKS * 2)
        for asked in (text, text + _text(rng, 5, WORDS + MARKS), text):
            whole = tokenizer.encode(asked, add_special_tokens=False)
            assert "".join(small.pieces(asked)) == asked
            assert small.encode(asked, lambda new: token_cache._tokenize(tokenizer, new)) == whole, (trial, asked)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return wrapped(_bytes())


def _turn(number: int, size: int = PIECE) -> str:
    body = f"{number} ".ljust(size, "a")
    return f"<|im_start|>user\n{body}</s>\n<|im_start|>assistant\n"


def test_of_the_next_turn_only_what_is_new_is_tokenised() -> None:
    asked: list[str] = []

    def tokenize(missing: list[str]) -> list[list[int]]:
        asked.extend(missing)
        return [[ord(letter) for letter in piece] for piece in missing]

    cache = TokenCache(["</s>", "<|im_start|>"])
    conversation = ""
    for turn in range(20):
        conversation += _turn(turn)
        asked.clear()
        assert cache.encode(conversation, tokenize) == [*map(ord, conversation)]
        assert len("".join(asked)) < 2 * PIECE, "a turn, and the end of the one before"
    asked.clear()
    cache.encode("<|im_start|>system\nof today</s>" + conversation, tokenize)
    assert len("".join(asked)) < 3 * PIECE, "another beginning does not move the cuts behind it"
    asked.clear()
    cache.encode(conversation, tokenize, namespace="another")
    assert "".join(asked) == conversation, "namespaces share nothing"
    asked.clear()
    assert cache.encode(_turn(50) * 4, tokenize) == [*map(ord, _turn(50) * 4)]
    assert len("".join(asked)) < 3 * PIECE, "what comes again is tokenised once"


def test_what_is_kept_is_bounded_and_the_latest() -> None:
    def tokenize(missing: list[str]) -> list[list[int]]:
        return [[7] * len(piece) for piece in missing]

    bound = 20 * 5 * PIECE
    cache = TokenCache(["<|im_start|>"], most_bytes=bound)
    latest = _turn(0) + _turn(1)
    for turn in range(200):
        cache.encode(latest if turn % 3 == 0 else _turn(turn) + _turn(-turn), tokenize)
        held = sum(token_cache._bytes(key, kept) for key, kept in cache._known.items())
        assert cache.held_bytes == held <= bound
    assert len(cache._known) > 10
    unasked = TokenCache.encode(cache, latest, lambda missing: [[9] * len(piece) for piece in missing])
    assert unasked[:PIECE] == [7] * PIECE, "what was used lately is still there"


def test_a_text_longer_than_all_that_is_kept_is_tokenised_all_the_same() -> None:
    cache = TokenCache([], most_bytes=PIECE)
    text = "a" * 10 * PIECE
    assert cache.encode(text, lambda missing: [[5] * len(piece) for piece in missing]) == [5] * len(text)
    assert cache.held_bytes == 0


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ([("<a>", False), ("<b>", False)], ["<a>", "<b>"]),
        ([("<a>", True), ("<b>", False)], ["<b>"]),
        ([("<a>", False), ("<a>>", False)], ["<a>>"]),
        ([("<a>", False), ("<<a>", False)], ["<<a>"]),
        ([("<a>", False), ("b<a", False)], []),
        ([("<a<", False)], []),
        ([("a>", False), ("<a", False), ("_b", False), (" <b>", False), ("<c>\n", False)], []),
        ([("<other>", False)], []),
        ([("", False)], []),
        ([(mark, False) for mark in MANY], sorted(MANY)[: token_cache.MOST_CUTS]),
    ],
)
def test_a_text_is_cut_only_where_a_token_begins_whatever_is_around_it(
    added: list[tuple[str, bool]], expected: list[str]
) -> None:
    likely = " ".join(text for text, _ in added if text != "<other>")
    assert cuts(added, likely) == expected


def test_who_is_asked_in_another_way_is_asked(tokenizer: Any) -> None:
    text = _turn(1)
    assert token_cache.tokens_of(tokenizer, text, {}) == tokenizer.encode(text)
    assert token_cache.tokens_of(tokenizer, text, {"add_special_tokens": False}) == tokenizer.encode(text)
    for asked, options in [(text, {"truncation": True}), ("short", {}), ([text], {}), (None, {})]:
        assert token_cache.tokens_of(tokenizer, asked, options) is None
    tokenizer.split_special_tokens = True
    try:
        assert token_cache.tokens_of(tokenizer, text, {}) is None
    finally:
        tokenizer.split_special_tokens = False


def test_a_tokenizer_that_begins_a_text_with_a_token_is_asked_unless_told_not_to() -> None:
    made = _bytes()
    made.add_special_tokens(["<s>"])
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))])
    tokenizer = wrapped(made)
    assert token_cache.tokens_of(tokenizer, _turn(1), {}) is None
    known = token_cache.tokens_of(tokenizer, _turn(1), {"add_special_tokens": False})
    assert known == tokenizer.encode(_turn(1), add_special_tokens=False)


def test_a_tokenizer_whose_texts_are_more_than_their_parts_is_asked(caplog: pytest.LogCaptureFixture) -> None:
    made = _bytes()
    made.post_processor = processors.TemplateProcessing("$A $A")
    with caplog.at_level("WARNING"):
        assert token_cache.tokens_of(wrapped(made), _turn(1), {}) is None
    assert "the whole text of every turn is tokenised" in caplog.text


def test_a_tokenizer_with_an_encode_of_its_own_is_asked() -> None:
    class Own(PreTrainedTokenizerFast):  # type: ignore[misc]
        def encode(self, *_: Any, **__: Any) -> list[int]:
            return [1]

    assert token_cache.tokens_of(Own(tokenizer_object=_bytes(), chat_template=TEMPLATE), _turn(1), {}) is None
    assert token_cache.tokens_of(object(), _turn(1), {}) is None


def test_a_tokenizer_that_cannot_be_looked_at_is_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("none of your business")

    monkeypatch.setattr(token_cache, "cuts", fail)
    strange = wrapped(_bytes())
    with caplog.at_level("WARNING"):
        assert token_cache.tokens_of(strange, _turn(1), {}) is None
        assert token_cache.tokens_of(strange, _turn(1), {}) is None
    assert caplog.text.count("none of your business") == 1


def test_a_text_that_no_context_holds_is_refused_before_it_is_cut(tokenizer: Any) -> None:
    def original(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("asked")

    texts._most = 2 * PIECE
    try:
        for encode in (texts.encode, texts.encode_prompt):
            assert encode(original, tokenizer, _turn(1)) == tokenizer.encode(_turn(1))
            with pytest.raises(ConfigError, match="does not fit into the context"):
                encode(original, tokenizer, _turn(1) * 3)
    finally:
        texts._most = None


def test_namespaces_are_those_of_the_request(tokenizer: Any) -> None:
    cache = token_cache._caches.get(tokenizer)
    token_cache.enter(None, None)
    token_cache.tokens_of(tokenizer, _turn(70), {})
    cache = token_cache._caches[tokenizer]
    assert cache is not None
    for keys in [("key", None), (None, "salt"), (["key"], ["salt"])]:
        before = len(cache._known)
        token_cache.enter(*keys)
        token_cache.tokens_of(tokenizer, _turn(70), {})
        assert len(cache._known) == before + 1
    token_cache.enter("", None)
    before = len(cache._known)
    token_cache.tokens_of(tokenizer, _turn(70), {})
    assert len(cache._known) == before
