"""Long texts: which are refused before they are tokenised, and that the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.frontend.segments.parallel import outer
from sglang_hybrid.engine.frontend.tokenization import pages, processing, texts


@pytest.fixture(autouse=True)
def unbound() -> Iterator[None]:
    yield
    texts._most = None


def manager(longest: int = 3, truncates: bool = False, batches: Any = None) -> Any:
    return SimpleNamespace(
        tokenizer=SimpleNamespace(get_vocab=lambda: {"a": 0, "b" * longest: 1}),
        context_len=10,
        server_args=SimpleNamespace(allow_auto_truncate=truncates),
        async_dynamic_batch_tokenizer=batches,
    )


@pytest.mark.parametrize(("longest", "most"), [(3, 10 * texts.CHARACTERS), (100, 1_000)])
def test_a_text_that_no_context_holds_is_refused(longest: int, most: int) -> None:
    texts.require_length(None, "a" * 10_000)  # of a process that serves nothing
    texts.bound(None, manager(longest))
    for given in ("a" * most, ["a" * most] * 3, [5] * 2 * most, None, [("a", "b")]):
        texts.require_length(None, given)
    for given in ("a" * (most + 1), ["a", "a" * (most + 1)], [["a", "a" * (most + 1)]]):
        with pytest.raises(ConfigError, match=f"more than {most} characters.*: {most + 1}"):
            texts.require_length(None, given)
    texts.require_piece("a" * most, "pattern")
    with pytest.raises(ConfigError):
        texts.require_piece("a" * (most + 1), "pattern")


def test_a_tokenizer_with_an_encode_of_its_own_is_asked_by_ours() -> None:
    class Own:
        def encode(self, text: str, allow_special_tokens: bool = True) -> list[int]:
            return [len(text), allow_special_tokens]

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    owner = manager()
    owner.tokenizer = tokenizer = Own()
    texts.bound(None, owner)
    assert tokenizer.encode("abc") == [3, True]
    assert tokenizer.encode("abc", False) == tokenizer.encode("abc", allow_special_tokens=False) == [3, False]
    texts.remember(("abc", {}, [5]))
    assert [tokenizer.encode("abc"), tokenizer.encode("abc")] == [[5], [3, True]]
    for given in ({}, {"allow_special_tokens": False}):
        with pytest.raises(ConfigError, match="more than 640 characters"):
            tokenizer.encode("a" * 641, **given)


def test_a_text_that_will_be_cut_may_be_longer() -> None:
    texts.bound(None, manager(truncates=True))
    texts.require_length(None, "a" * 10_000)


def test_without_a_tokenizer_there_are_no_texts() -> None:
    texts.bound(None, SimpleNamespace(tokenizer=None))
    texts.require_length(None, "a" * 10_000)


@pytest.mark.parametrize("given", ["a" * texts.LONG, ["a" * (texts.LONG // 2)] * 2, [["a" * texts.LONG, "b"]]])
def test_a_long_text_leaves_the_event_loop_to_others(given: Any) -> None:
    async def run() -> Any:
        tokenised = threading.Event()

        async def original(_: Any, got: Any, pairs: bool) -> Any:
            assert tokenised.wait(60), "the event loop waits for the text"
            return got, pairs

        work = asyncio.create_task(texts.tokenize(original, manager(), given, True))
        await asyncio.sleep(0)
        tokenised.set()
        return await work

    assert asyncio.run(run()) == (given, True)


@pytest.mark.parametrize("given", ["a", ["a"] * 3, [["a", "b"]], "", None])
def test_a_short_text_is_tokenised_where_it_came(given: Any) -> None:
    async def original(_: Any, got: Any, pairs: bool) -> Any:
        return got, threading.get_ident()

    assert asyncio.run(texts.tokenize(original, manager(), given)) == (given, threading.get_ident())


class Asked(SimpleNamespace):
    """A request to `/v1/tokenize`."""

    async def body(self) -> bytes:
        return b"a" * texts.LONG


@pytest.mark.parametrize("extra", [{}, {pages.KEY: {"endpoint": "/generate", "body": {"text": "a"}, "page_tokens": 1}}])
def test_a_question_about_a_long_text_leaves_the_event_loop_to_others(
    extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenised = threading.Event()

    def ids(*_: Any) -> list[int]:
        assert tokenised.wait(60), "the event loop waits for the text"
        return [5, 6, 7]

    async def original(*_: Any) -> Any:
        return SimpleNamespace(body=json.dumps({"count": len(ids())}).encode())

    async def run() -> Any:
        http = Asked(app=SimpleNamespace(state=None))
        work = asyncio.create_task(pages.tokenize(original, None, None, Asked(model_extra=extra, messages=None), http))
        await asyncio.sleep(0)
        tokenised.set()
        return json.loads((await work).body)["count"]

    monkeypatch.setattr(pages, "_ids", ids)
    assert asyncio.run(run()) == 3


@pytest.mark.parametrize(("longest", "told"), [(4096, 4096), (int(1e30), 2048), (-1, -1)])
def test_a_tokenizer_that_knows_no_longest_text_has_the_context(longest: int, told: int) -> None:
    """SGLang 0.5.17 cannot write 10^30, which transformers says for none, and answers 500."""
    serving = SimpleNamespace(tokenizer_manager=SimpleNamespace(model_config=SimpleNamespace(context_len=2048)))

    async def original(*_: Any) -> Any:
        return SimpleNamespace(tokens=[5], max_model_len=longest)

    asked = Asked(model_extra={}, messages=None)
    answer = asyncio.run(pages.tokenize(original, serving, None, asked, asked))
    assert json.loads(answer.body)["max_model_len"] == told


@pytest.mark.parametrize("tokens", [[5, 6], [[5], [6, 7]]])
def test_tokens_are_written_by_us_as_fastapi_would(tokens: list[Any]) -> None:
    """FastAPI looks at each number: millions of tokens took seconds in the event loop."""
    from fastapi.encoders import jsonable_encoder
    from sglang.srt.entrypoints.openai.protocol import TokenizeResponse

    answer = TokenizeResponse(tokens=tokens, count=len(tokens), max_model_len=2048)
    written = pages._written(answer, None)
    assert written.headers["content-type"] == "application/json"
    assert json.loads(written.body) == jsonable_encoder(answer)
    assert pages._written(refusal := SimpleNamespace(body=b"{}"), None) is refusal


def test_what_is_wrong_with_a_long_text_is_said() -> None:
    async def refuses(_: Any, got: Any, pairs: bool) -> Any:
        raise ConfigError("no")

    async def waits(_: Any, got: Any, pairs: bool) -> Any:
        await asyncio.sleep(0)

    for original, error in ((refuses, ConfigError), (waits, RuntimeError)):
        with pytest.raises(error):
            asyncio.run(texts.tokenize(original, manager(), "a" * texts.LONG))


def test_batches_of_sglangs_own_wait_in_the_event_loop() -> None:
    async def original(_: Any, got: Any) -> Any:
        await asyncio.sleep(0)
        return got

    long = "a" * texts.LONG
    assert asyncio.run(texts.tokenize(original, manager(batches=object()), long)) == long


@pytest.mark.parametrize(("single", "turns"), [(False, [1, 2, 3]), (True, [0, 0, 0])])
def test_between_the_prompts_of_a_list_others_get_turns(single: bool, turns: list[int]) -> None:
    async def original(_: Any, obj: Any) -> Any:
        return obj

    async def run() -> list[int]:
        outer.set(SimpleNamespace(is_single=single))
        owner, others, found = manager(), list[int](), list[int]()
        owner.rid_to_state = {}
        for number in range(3):
            asyncio.get_running_loop().call_soon(others.append, number)
            await processing.tokenize(original, owner, SimpleNamespace(rid=str(number)))
            found.append(len(others))
        return found

    assert asyncio.run(run()) == turns
