"""Bounds that ordinary clients meet: what stock SGLang serves is served, and what is too much is refused early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.frontend import endpoints, requests
from sglang_hybrid.engine.frontend.validation import limits, prompt
from sglang_hybrid.engine.frontend.validation.prompt import require_prompt
from tests.unit.engine.frontend.test_requests import VOCABULARY, manager, normalized, sampled


def logprobs(prompt: int = 5, **fields: Any) -> Any:
    obj = normalized(return_logprob=True, top_logprobs_num=20, **fields)
    require_prompt(manager(), obj if obj.is_single else obj[0], [5] * prompt)
    return (obj if obj.is_single else obj[0]).sampling_params.get("max_new_tokens")


def test_log_probabilities_without_an_end_are_cut_and_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most answers end long before the context does."""
    assert logprobs(sampling_params={"max_new_tokens": None}) is None
    monkeypatch.setattr(prompt, "LOGPROBS", 21 * 1000)
    assert logprobs(sampling_params={"max_new_tokens": None}) == 1000
    assert logprobs(sampling_params={"max_new_tokens": None}, logprob_start_len=0) == 995
    assert logprobs(sampling_params={"max_new_tokens": 1000}) == 1000
    with pytest.raises(ConfigError, match="1001 x 21 x 1"):
        logprobs(sampling_params={"max_new_tokens": 1001})


def test_what_weighs_too_much_is_refused_as_soon_as_that_is_seen() -> None:
    class Endless(list):  # type: ignore[type-arg]
        """Says how much of it was looked at."""

        def __iter__(self) -> Any:
            raise AssertionError("the level below is not looked at")

    heavy = [[0] * (limits.WEIGHT // 2), [0] * (limits.WEIGHT // 2 + 1), Endless()]
    with pytest.raises(ConfigError, match="mine hold at most 4194304 values"):
        limits.weight(heavy, "mine")


def test_strict_tools_make_long_tags() -> None:
    sampled(structural_tag="a" * (4 * limits.GRAMMAR))
    with pytest.raises(ConfigError, match="strict tools make one of their schemas"):
        sampled(structural_tag="a" * (4 * limits.GRAMMAR + 1))


def test_ids_of_an_ollama_chat_are_read_from_what_transformers_answers() -> None:
    """SGLang up to 0.5.22 passes the answer on as it is, and refuses it later as the client's mistake."""
    from sglang.srt.managers.io_struct import GenerateReqInput
    from transformers import BatchEncoding

    seen: list[Any] = []

    async def original(_: Any, obj: Any, __: Any) -> AsyncIterator[dict[str, Any]]:
        seen.append(obj.input_ids)
        yield {}

    async def run() -> None:
        obj = GenerateReqInput(input_ids=BatchEncoding({"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]}))
        config = SimpleNamespace(vocab_size=VOCABULARY, is_multimodal=False)
        arguments = SimpleNamespace(tokenizer_metrics_allowed_custom_labels=None, dp_size=1)
        owner = SimpleNamespace(model_config=config, tokenizer=None, rid_to_state={}, server_args=arguments)
        async for _ in requests.generate(original, owner, obj):
            pass

    asyncio.run(run())
    assert seen == [[5, 6, 7]]


@pytest.mark.parametrize("knows", [True, False])
def test_a_salt_keeps_tenants_apart_where_sglang_does_not_know_it(knows: bool) -> None:
    """SGLang 0.5.17 ignores it at `/generate`, and one tenant would be served what another cached."""
    from fastapi.exceptions import RequestValidationError

    class GenerateReqInput:
        __dataclass_fields__ = {"extra_key": None} | ({"cache_salt": None} if knows else {})

    fields = [SimpleNamespace(field_info=SimpleNamespace(annotation=GenerateReqInput))]

    async def read(**given: Any) -> Any:
        return given["received_body"]

    def body(**given: Any) -> Any:
        return asyncio.run(endpoints.read_body(read, body_fields=fields, received_body=given))

    for given, key in (({}, "a"), ({"extra_key": "b"}, "ab")):
        salted = {"cache_salt": "a", **given}
        assert body(**salted) == (salted if knows else {**salted, "extra_key": key})
    assert body(extra_key="b") == {"extra_key": "b"}
    if not knows:
        with pytest.raises(RequestValidationError, match="cache_salt is one text"):
            body(cache_salt=["a", "b"])
