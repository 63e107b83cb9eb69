"""What a request may ask for is decided before SGLang sees it: SGLang's own request classes, no server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid import __version__
from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.frontend.admin import access
from sglang_hybrid.engine.frontend.requests import release, truncate, validate
from sglang_hybrid.engine.frontend.validation import bodies, ids, limits, prompt
from sglang_hybrid.engine.frontend.validation.arrival import require_arrival
from sglang_hybrid.engine.frontend.validation.prompt import require_embeds, require_prompt
from sglang_hybrid.engine.launch import fingerprint
from sglang_hybrid.engine.surface import registration
from sglang_hybrid.engine.surface.hooks import HOOKS
from sglang_hybrid.engine.surface.rows import full_name
from tests.versions import since

VOCABULARY = 320
POOLED = since("0.5.21", "token_indices_to_pool")
DEEP: Any = 0
for _ in range(100):
    DEEP = [DEEP]


def arrive(**fields: Any) -> Any:
    """A request of a client, checked; it is returned as SGLang goes on with it."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    obj = GenerateReqInput(**{"input_ids": [5, 6, 7], **fields})
    require_arrival(obj, VOCABULARY, most_sequences=64, from_client=True)
    return obj


def sampled(**params: Any) -> Any:
    return arrive(sampling_params=params)


@since("0.5.21", "cache_salt at /generate")
def test_ordinary_requests_pass() -> None:
    arrive(rid="chat-1", priority=3, cache_salt="a\nb", extra_key="", session_id="s", logprob_start_len=-1)
    arrive(input_ids=[[5], [6, 7]], rid=["a", "b"], top_logprobs_num=[1, 0], sampling_params=[{"n": 2}, {"n": 2}])
    arrive(input_ids=[[5], [6]], sampling_params=[{"max_new_tokens": 3}, None])
    arrive(input_ids=None, text="hello", token_ids_logprob=[1, 2], return_logprob=True, top_logprobs_num=VOCABULARY)
    arrive(input_ids=[], session_params={"id": "s", "rid": "r", "replace": True})
    arrive(rid=["a"], cache_salt=["s"], extra_key=["k"], lora_path=["l"], sampling_params={"n": 2})
    arrive(input_ids=[[5], [6]], image_data="a", video_data="b")
    sampled(top_k=-1, stop=["a", "b"], stop_token_ids=[5, None], logit_bias={"5": -1e9}, stop_regex=r"\d{1,16}\.")
    sampled(regex="a" * limits.GRAMMAR, custom_params={"cache_boundaries": [1], "own": {"nested": [{"deeper": 1}]}})


def test_numbers_that_came_as_texts_are_numbers() -> None:
    params = sampled(temperature="0.5", ignore_eos=1, max_new_tokens=None, n=None, min_p=None).sampling_params
    assert params == {"temperature": 0.5, "ignore_eos": True, "max_new_tokens": None, "min_p": None}


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"foo": 1}, "unknown sampling parameter; known are .*'foo'"),
        ({"is_normalized": True}, "unknown sampling parameter"),
        ({"n": 0}, "n is a whole number from 1"),
        ({"n": -3}, "n is a whole number from 1 to .*: -3"),
        ({"n": 65}, "--hybrid-max-sequences.*: 1 x 65"),
        pytest.param({"beam_width": 65}, "--hybrid-max-sequences", marks=since("0.5.21", "beams")),
        ({"n": 1.5}, "sampling parameter n has another type"),
        ({"top_k": 2**40}, f"top_k is a whole number from -1 to {2**30}: {2**40}"),
        ({"temperature": "hot"}, "temperature has another type.*'hot'"),
        ({"skip_special_tokens": "x"}, "skip_special_tokens has another type"),
        ({"max_new_tokens": 1.5}, "max_new_tokens has another type"),
        ({"max_new_tokens": 2**63}, "max_new_tokens is a whole number"),
        ({"min_new_tokens": -1}, "min_new_tokens is a whole number"),
        ({"stream_interval": 0}, "stream_interval is a whole number from 1"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty is at least 0.01: 1e-300"),
        ({"logit_bias": {"5": "x"}}, "logit_bias has another type"),
        ({"logit_bias": [1]}, "logit_bias has another type"),
        ({"logit_bias": {"320": 1}}, "logit_bias names tokens of the vocabulary, 0 to 319: '320'"),
        ({"logit_bias": {"5": 1e308}}, "logit_bias is a number within"),
        ({"stop_token_ids": [320]}, r"stop_token_ids are tokens of the vocabulary, 0 to 319: \[320\]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids are tokens"),
        ({"stop_token_ids": [[1]]}, "stop_token_ids has another type"),
        ({"stop": 5}, "stop has another type"),
        ({"stop": ["a"] * 33}, "stop has at most 32 texts of 1024 characters: 33 of"),
        ({"stop": "a" * 1025}, "stop has at most 32 texts"),
        ({"stop_regex": "("}, "stop_regex is no regular expression"),
        ({"regex": "a" * 65_537}, "regex has at most 65536 characters: 65537"),
        ({"json_schema": 5}, "json_schema has another type"),
        ({"custom_params": "a"}, "custom_params has another type"),
        ({"custom_params": {"a": DEEP}}, "sampling_params is nested at most 64 levels"),
        ({"custom_params": {"a": "x" * 2**26}}, "sampling_params hold at most"),
        ({"n": 64, "custom_params": {"a": list(range(70_000))}}, "sampling_params hold at most"),
    ],
)
def test_sampling_parameters_that_harm_are_refused(params: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sampled(**params)


def test_whoever_runs_sglang_in_his_own_process_sends_as_much_as_he_likes() -> None:
    from sglang.srt.managers.io_struct import GenerateReqInput

    many = GenerateReqInput(input_ids=[[5]] * 1_000, received_time=1e18)
    require_arrival(many, VOCABULARY, most_sequences=64, from_client=False)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input_ids": []}, "at least one token"),
        ({"input_ids": [[5], []]}, "at least one token"),
        ({"input_ids": None, "input_embeds": [[]]}, "at least one vector"),
        ({"input_ids": None, "text": ["a", 5]}, "text is one prompt or a list of prompts"),
        ({"text": ["a", "b"]}, "give the prompts once.*: text, input_ids"),
        ({"input_ids": [[5]] * 65}, "--hybrid-max-sequences.*: 65 x 1"),
        ({"input_ids": [[5], [6]], "top_logprobs_num": [1]}, r"one per prompt \(2\): 1 values"),
        ({"top_logprobs_num": [1]}, r"one per prompt \(1\)"),
        ({"top_logprobs_num": 321}, "top log-probabilities is a whole number from 0 to 320: 321"),
        ({"top_logprobs_num": -1}, "top log-probabilities is a whole number"),
        ({"logprob_start_len": 2**62}, "logprob_start_len is a whole number"),
        ({"token_ids_logprob": [[5]]}, "token_ids_logprob is one list"),
        ({"multi_item_delimiter_indices": [[1], [2]]}, "multi_item_delimiter_indices is one list"),
        ({"sampling_params": []}, "sampling_params are one object, or a list"),
        ({"input_ids": [[5], [6]], "sampling_params": [{}]}, "sampling_params are one object, or a list"),
        ({"rid": ""}, "rid has 1 to 256 characters: 0"),
        ({"rid": "x" * 257}, "rid has 1 to 256 characters: 257"),
        ({"rid": "a\nb"}, r"rid has no line breaks or control characters: 'a\\nb'"),
        ({"rid": "a\u2028b"}, "rid has no line breaks"),
        ({"session_id": "\x1b[31m"}, "session_id has no line breaks"),
        ({"lora_path": "a\rb"}, "lora_path has no line breaks"),
        pytest.param(
            {"cache_salt": "x" * 1025},
            "cache_salt is a text of at most 1024 characters",
            marks=since("0.5.21", "cache_salt at /generate"),
        ),
        ({"priority": 2**31}, "priority is a whole number"),
        ({"session_params": {"foo": 5}}, "unknown session parameter"),
        ({"session_params": {"id": 5}}, "session parameter id has another type"),
        ({"session_params": {"id": "a", "replace": True}}, "names the request to replace"),
        ({"http_worker_ipc": "ipc:///tmp/x"}, "http_worker_ipc is set by the server"),
        ({"lora_id": []}, "lora_id is set by the server"),
        ({"positional_embed_overrides": {"a": 1}}, "positional_embed_overrides are set by the server"),
        ({"received_time": 1e18}, "received_time is the server's"),
        ({"image_data": 5}, "image_data is a text, an object, or a list"),
        ({"input_ids": [[5], [6]], "bootstrap_host": []}, r"bootstrap_host is one value, .* prompt \(2\): 0 values"),
        ({"rid": ["a"], "sampling_params": {"n": 1}}, r"one per prompt \(1\): 1 values"),
        ({"input_ids": [[5], [6]], "image_data": ["a"]}, "image_data is a list with one entry per prompt"),
        ({"images_config": {"a": DEEP}}, "images_config is nested"),
    ],
)
def test_requests_that_harm_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        arrive(**fields)


def manager(multimodal: bool = False) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(vocab_size=VOCABULARY, is_multimodal=multimodal),
        context_len=32_768,
        server_args=SimpleNamespace(disable_radix_cache=False, chunked_prefill_size=-1),
    )


def normalized(**fields: Any) -> Any:
    obj = arrive(**fields)
    obj.normalize_batch_and_arguments()
    return obj


@pytest.mark.parametrize("bad", [[-1], [320], [5, 2**62], [2**70]])
def test_ids_outside_the_vocabulary_are_refused(bad: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"token ids are those of the vocabulary, 0 to 319"):
        require_prompt(manager(), normalized(), bad)
    require_prompt(manager(), normalized(), [0, 319])


@pytest.mark.parametrize(("tokens", "left"), [(98, 98), (99, 99), (100, 99), (101, 99), (40_000, 99)])
def test_a_prompt_that_may_be_truncated_is_left_room_for_an_answer(tokens: int, left: int) -> None:
    """SGLang leaves `max_req_input_len` tokens, or the whole context: both are answered by no token, or not at all."""
    server = manager()
    server.max_req_input_len, server.allow_auto_truncate = 100, True
    ids = [5] * tokens
    truncate(server, normalized(), ids)
    assert len(ids) == left
    ids = [5] * tokens
    truncate(server, normalized(image_data=["a"]), ids)
    server.allow_auto_truncate = False
    truncate(server, normalized(), ids)
    assert len(ids) == tokens


def test_marks_behind_the_end_of_a_truncated_prompt_are_lost_alone() -> None:
    server = manager()
    server.max_req_input_len, server.allow_auto_truncate = 100, True
    obj, ids = normalized(), [5] * 400
    obj.sampling_params = {"custom_params": {"cache_boundaries": [40, 99, 100, 400], "cache_hints": {"final": True}}}
    validate(server, obj, ids)
    left = {"cache_boundaries": [40, 99], "cache_breakpoints_lost": 2, "cache_hints": {"final": True}}
    assert obj.sampling_params["custom_params"] == left
    obj.sampling_params = {"custom_params": {"cache_boundaries": [40, "x"]}}
    with pytest.raises(ConfigError, match="is a list of token positions"):
        validate(server, obj, [5] * 400)


def test_placeholders_that_sglang_puts_for_an_image_are_its_own() -> None:
    with_image = normalized(image_data=["a"])
    require_prompt(manager(multimodal=True), with_image, [5, 10**9])
    with pytest.raises(ConfigError, match="token ids"):
        require_prompt(manager(), with_image, [5, 10**9])
    with pytest.raises(ConfigError, match="token ids"):
        require_prompt(manager(multimodal=True), normalized(image_data=["a"], input_ids=[10**6]), [5])


@pytest.mark.parametrize(
    ("fields", "ids", "words"),
    [
        ({}, [], "at least one token"),
        pytest.param(
            {"token_indices_to_pool": [3]}, [5, 6, 7], "token_indices_to_pool are positions in the prompt", marks=POOLED
        ),
        pytest.param(
            {"token_indices_to_pool": [2]}, [5, 6, 7], "start the server with --disable-radix-cache", marks=POOLED
        ),
        ({"sampling_params": {"n": 64}}, [5] * (limits.TOKENS // 64 + 1), "a prompt times its samples"),
        (
            {"return_logprob": True, "top_logprobs_num": 320, "sampling_params": {"max_new_tokens": 60_000, "n": 2}},
            [5],
            "log-probabilities; .*: 32767 x 321 x 2",
        ),
        (
            {"return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": [5] * 300},
            [5] * 60_000,
            "log-probabilities",
        ),
    ],
)
def test_prompts_that_harm_are_refused(fields: dict[str, Any], ids: list[int], words: str) -> None:
    obj = normalized(**fields)
    with pytest.raises(ConfigError, match=words):
        require_prompt(manager(), obj if obj.is_single else obj[0], ids)


def test_an_error_message_is_one_short_line() -> None:
    for value in ("a\nb" * 10**6, b"\n" * 10**6, ["x\n"] * 10**5, {"a": "\n" * 10**6}):
        said = limits.shown(value)
        assert len(said) <= 80
        assert "\n" not in said


@since("0.5.21", "ids of samples before they are sent")
def test_unsent_states_of_a_finished_request_go_and_others_stay() -> None:
    """Three samples of one prompt: SGLang's first state is gone, two were never sent; a stranger has one of the ids."""
    obj = arrive(stream=True, rid="mine", sampling_params={"n": 3})
    obj.normalize_batch_and_arguments()
    unsent = {rid: SimpleNamespace(obj=obj[i], dispatched=False) for i, rid in enumerate(obj.rid)}
    stranger = SimpleNamespace(obj=object(), dispatched=False)
    sent = SimpleNamespace(obj=obj[2], dispatched=True)
    states = {**unsent, "other": stranger, obj.rid[1]: stranger, obj.rid[2]: sent}
    release(SimpleNamespace(rid_to_state=states), obj)
    assert states == {"other": stranger, obj.rid[1]: stranger, obj.rid[2]: sent}


def test_ids_of_health_checks_are_for_health_checks() -> None:
    mine = SimpleNamespace(rid=["a", "HEALTH_CHECK_1"])
    with pytest.raises(ConfigError, match="for health checks: 'HEALTH_CHECK_1'"):
        ids.require_own(mine, "/generate")
    ids.require_own(mine, "/health_generate")


def test_the_server_info_has_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_MAMBA_CONV_DTYPE", raising=False)
    info = {
        "api_key": "one",
        "admin_api_key": "two",
        "launch_command": "--api-key one --admin-api-key two --port 1",
        "internal_states": [{"api_key": "one", "admin_api_key": None}],
        "port": 1,
    }
    monkeypatch.delenv(fingerprint.ENVIRONMENT_KEY, raising=False)
    masked = access.mask(info)
    assert masked == {
        "sglang_hybrid": __version__,
        "api_key": "***",
        "admin_api_key": "***",
        "launch_command": "--api-key *** --admin-api-key *** --port 1",
        "internal_states": [{"api_key": "***", "admin_api_key": None}],
        "port": 1,
    }
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float32")
    assert access.mask(info) == {**masked, "mamba_conv_dtype": "float32"}, "for those that hand states over"
    monkeypatch.setenv(fingerprint.ENVIRONMENT_KEY, "0a")
    assert access.mask(info) == {**masked, "mamba_conv_dtype": "float32", "model_fingerprint": "0a"}
    assert access.mask({"api_key": "one"}) is None, "only what /server_info says"


async def chunks(_: Any) -> AsyncIterator[bytes]:
    for _ in range(3):
        yield b"x" * 400


def received(path: str, declared: str) -> int:
    """Bytes of a body of 1,200 that an endpoint gets."""
    request = SimpleNamespace(url=SimpleNamespace(path=path), headers={"content-length": declared} if declared else {})

    async def read() -> int:
        return sum([len(chunk) async for chunk in bodies.stream(chunks, request)])

    return asyncio.run(read())


def test_a_body_has_an_end_unless_it_holds_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi import HTTPException

    monkeypatch.setattr(bodies, "settings", lambda: HybridConfig(max_body_mb=0.001))
    for declared in ("1200", "", "1"):
        with pytest.raises(HTTPException, match="413: a body has at most 1000 bytes"):
            received("/generate", declared)
    assert received("/update_weights_from_tensor", "1200") == 1_200
    monkeypatch.setattr(bodies, "settings", HybridConfig)
    assert received("/generate", "1200") == 1_200


def test_an_endpoint_that_is_gone_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    targets: list[str] = []
    monkeypatch.setattr(HookRegistry, "register", lambda target, *_: targets.append(target))
    there, gone = [hook for hook in HOOKS if hook.function.startswith("frontend.endpoints:re")][:2]
    monkeypatch.setattr(registration, "HOOKS", (there, replace(gone, target="srt.nowhere:function")))
    assert registration.register([""]) == [], "none is required"
    assert targets == [full_name(there.target).replace(":", ".")]


@pytest.mark.parametrize(
    ("given", "architecture", "why"),
    [
        (None, "Qwen3NextForCausalLM", ""),
        ([[0.5] * 4], "NemotronHForCausalLM", ""),
        ([[[0.5] * 4, [0.25] * 4], [[0.5] * 4]], "NemotronHForCausalLM", ""),
        ([[0.5] * 4, [0.5] * 3], "NemotronHForCausalLM", "as wide as the model, 4 numbers: 3"),
        ([[[0.5] * 4], [[0.5] * 4, []]], "NemotronHForCausalLM", "4 numbers: 0"),
        ([[0.5] * 4], "Qwen3NextForCausalLM", "send text or input_ids: Qwen3NextForCausalLM"),
    ],
)
def test_vectors_are_as_wide_as_the_model(given: Any, architecture: str, why: str) -> None:
    config = SimpleNamespace(hidden_size=4, hf_config=SimpleNamespace(architectures=[architecture]))
    if not why:
        require_embeds(given, config)
        return
    with pytest.raises(ConfigError, match=why):
        require_embeds(given, config)


def test_models_without_vectors_are_those_that_call_them_otherwise() -> None:
    from inspect import signature

    from sglang.srt.models.falcon_h1 import FalconH1ForCausalLM
    from sglang.srt.models.nemotron_h import NemotronHForCausalLM
    from sglang.srt.models.qwen3_next import Qwen3NextForCausalLM

    takes = {
        model.__name__: "input_embeds" in signature(model.forward).parameters
        for model in (FalconH1ForCausalLM, NemotronHForCausalLM, Qwen3NextForCausalLM)
    }
    assert [name for name, does in takes.items() if not does] == sorted(prompt._WITHOUT_EMBEDS)
