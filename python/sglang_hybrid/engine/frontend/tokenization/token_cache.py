"""Tokens of texts that were tokenised before: of the next turn of a conversation only what is new has to be.

A quarter of a second for each 100,000 tokens, in the event loop, is longer than the prefill behind a cached prefix. A
tokenizer looks for special tokens first, and takes what lies between two of them by itself. So where one begins a text
can be cut: its tokens are those of its pieces.
"""

from __future__ import annotations

import logging
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

logger = logging.getLogger(__name__)

PIECE = 2048
"""Characters from which on a piece is cut off; a text without as many is tokenised as it comes."""

MOST_BYTES = 128 << 20
"""Of pieces and their tokens, in each HTTP process: some hundred conversations of 100,000 tokens."""

MOST_CUTS = 16

_tenant: ContextVar[str] = ContextVar("tenant", default="")
_caches: WeakKeyDictionary[Any, TokenCache | None] = WeakKeyDictionary()


class TokenCache:
    """Tokens of pieces, at most `most_bytes` of them, the least recently used leave; texts are cut before `cuts`.

    Thread safe. Namespaces share nothing: how long a text takes would tell whether another tenant has sent it.
    """

    def __init__(self, cuts: Sequence[str], most_bytes: int = MOST_BYTES, piece: int = PIECE) -> None:
        self._cuts, self._most_bytes, self._piece = tuple(cuts), most_bytes, piece
        self._known: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._lock = Lock()
        self.held_bytes = 0

    def pieces(self, text: str) -> Iterator[str]:
        """Its parts, each cut off where the first of the cuts begins behind `piece` characters.

        A text that goes on otherwise behind some position has the same pieces up to the last cut before that.
        """
        start = 0
        ahead = {cut: text.find(cut, self._piece) for cut in self._cuts}
        while ahead := {cut: at for cut, at in ahead.items() if at >= 0}:
            end = min(ahead.values())
            yield text[start:end]
            start, least = end, end + self._piece
            for cut, at in ahead.items():
                if at < least:
                    ahead[cut] = text.find(cut, least)
        yield text[start:]

    def encode(self, text: str, tokenize: Callable[[list[str]], list[list[int]]], namespace: str = "") -> list[int]:
        """The tokens of `text`; `tokenize` is asked for those of the pieces that are not known, once for all."""
        pieces = list(self.pieces(text))
        found = [self._find((namespace, piece)) for piece in pieces]
        missing = list(dict.fromkeys(piece for piece, known in zip(pieces, found, strict=True) if known is None))
        made = dict(zip(missing, tokenize(missing), strict=True)) if missing else {}
        ids: list[int] = []
        for piece, known in zip(pieces, found, strict=True):
            ids += made[piece] if known is None else known.tolist()
        for piece, tokens in made.items():
            self._keep((namespace, piece), tokens)
        return ids

    def _find(self, key: tuple[str, str]) -> array[int] | None:
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
        return known

    def _keep(self, key: tuple[str, str], tokens: list[int]) -> None:
        if len(key[1]) < self._piece:
            return  # the end of a text, which goes on otherwise the next time
        kept = array("i", tokens)
        with self._lock:
            if key not in self._known:
                self._known[key] = kept
                self.held_bytes += _bytes(key, kept)
            while self.held_bytes > self._most_bytes:
                self.held_bytes -= _bytes(*self._known.popitem(last=False))


def _bytes(key: tuple[str, str], kept: array[int]) -> int:
    return sys.getsizeof(key[1]) + sys.getsizeof(kept)


def cuts(added: Sequence[tuple[str, bool]], likely: str) -> list[str]:
    """Of the `added` tokens of a tokenizer, (text, bound), those in `likely` before which any text can be cut.

    A tokenizer finds one of those wherever it stands, and takes nothing before it; what is `bound` depends on what is
    around it. None begins before another and ends within it or behind it, and none has ends that are letters or space,
    which change what tokens beside it may match or take.
    """
    texts = [text for text, _ in added if text]
    found = [
        text
        for text, bound in added
        if text
        and text in likely
        and not bound
        and not any(end.isalnum() or end.isspace() or end == "_" for end in (text[0], text[-1]))
        and not any(_hides(other, text) for other in texts)
    ]
    return sorted(found)[:MOST_CUTS]


def _hides(other: str, text: str) -> bool:
    """Whether `text` may stand in what a tokenizer takes for `other`: it is part of it, or begins before its end."""
    if other != text and text in other:
        return True
    return any(other.endswith(text[:size]) for size in range(1, min(len(text), len(other))))


def enter(extra_key: Any, cache_salt: Any) -> None:
    """From here on the texts of this task are of that namespace."""
    _tenant.set(repr((extra_key, cache_salt)) if extra_key or cache_salt else "")


def enter_of(request: Any) -> None:
    """From here on the texts of this task are of `request`'s namespace."""
    enter(getattr(request, "extra_key", None), getattr(request, "cache_salt", None))


def tokens_of(tokenizer: Any, text: Any, options: dict[str, Any]) -> list[int] | None:
    """What `tokenizer.encode(text, **options)` returns; None where it has to be asked."""
    if not isinstance(text, str) or len(text) < PIECE or options.keys() - {"add_special_tokens"}:
        return None
    if not getattr(tokenizer, "is_fast", False) or getattr(tokenizer, "split_special_tokens", False):
        return None
    if tokenizer not in _caches:
        _caches[tokenizer] = None  # while it is tried
        try:
            _caches[tokenizer] = _cache(tokenizer)
        except Exception as error:  # no request has to know
            logger.warning("the whole text of every turn is tokenised: %s", error)
    cache = _caches[tokenizer]
    if cache is None:
        return None
    if options.get("add_special_tokens", True) and tokenizer.num_special_tokens_to_add():
        return None
    return cache.encode(text, lambda missing: _tokenize(tokenizer, missing), _tenant.get())


def _tokenize(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """All of them at once: a tokenizer in Rust takes a core for each."""
    made = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False)
    return [list(ids) for ids in made["input_ids"]]


def _cache(tokenizer: Any) -> TokenCache | None:
    """A cache for what `tokenizer` makes, None where its texts cannot be cut."""
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    ours, base = type(tokenizer), TokenizersBackend
    if not isinstance(tokenizer, base) or any(
        getattr(ours, name) is not getattr(base, name) for name in ("encode", "__call__", "_encode_plus")
    ):
        return None
    added = [
        (token.content, bool(token.normalized or token.single_word or token.lstrip))
        for token in tokenizer.added_tokens_decoder.values()
    ]
    likely = f"{tokenizer.chat_template or ''} {tokenizer.all_special_tokens}"
    found = cuts(added, likely)
    if not found:
        return None
    # What the tokenizer is made of is not looked at, but whether it does as it should.
    probe = "".join(f" a  b\n\n{cut}\n{cut}12 é\u0301 {cut}{cut}x" for cut in found) + "  "
    trial = TokenCache(found, piece=1)
    whole = tokenizer.encode(probe, add_special_tokens=False)
    if trial.encode(probe, lambda missing: _tokenize(tokenizer, missing)) != whole:
        logger.warning("the whole text of every turn is tokenised: this tokenizer does not take parts by themselves")
        return None
    return TokenCache(found)
