"""Requests with which one client ends or stalls SGLang's server, or gets a 500 for its own mistake.

docs/upstream.md says what SGLang itself answers to each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.versions import since

IDS = [5, 6, 7, 8]
MESSAGES = [{"role": "user", "content": "hi"}]
DEEP: Any = 0
for _ in range(900):
    DEEP = [DEEP]


def native(sampling: dict[str, Any] | None = None, **fields: Any) -> tuple[str, Any]:
    return "/generate", {"input_ids": IDS, "sampling_params": {"max_new_tokens": 4, **(sampling or {})}, **fields}


def chat(**fields: Any) -> tuple[str, Any]:
    return "/v1/chat/completions", {"model": "m", "messages": MESSAGES, "max_tokens": 4, **fields}


def completion(**fields: Any) -> tuple[str, Any]:
    return "/v1/completions", {"model": "m", "prompt": IDS, "max_tokens": 4, **fields}


ENDS = {
    "an id below the vocabulary": native(input_ids=[-1]),
    "an id beyond the vocabulary": native(input_ids=[1_000_000]),
    "one in a batch": native(input_ids=[[5], [1_000_000]]),
    "one in a completion": completion(prompt=[1_000_000]),
    "one in a chat": chat(input_ids=[1_000_000]),
    "one in a query to score": ("/v1/score", {"model": "m", "query": [5], "items": [[10**6]], "label_token_ids": [5]}),
    "one for Vertex": ("/vertex_generate", {"instances": [{"input_ids": [10**6]}]}),
    "nothing to score": ("/v1/score", {"model": "m", "query": [], "items": [[]], "label_token_ids": [5]}),
    "an empty prompt in a batch": native(input_ids=[[]]),
    "more top log-probabilities than tokens": native(return_logprob=True, top_logprobs_num=10**6),
    "one more of them": native(return_logprob=True, top_logprobs_num=321),
    "logprobs of a completion": completion(logprobs=10**6),
    "top_logprobs of a chat": chat(logprobs=True, top_logprobs=10**6),
    "top_k": native({"top_k": 2**40}),
    "top_k of a chat": chat(top_k=2**40),
    "top_k of Anthropic's": ("/v1/messages", {"model": "m", "max_tokens": 4, "messages": MESSAGES, "top_k": 2**40}),
    "top_k of Ollama's": ("/api/generate", {"model": "m", "prompt": "a", "stream": False, "options": {"top_k": 2**40}}),
    "a stop token beyond the vocabulary": native({"stop_token_ids": [10**6], "min_new_tokens": 2}),
    "a stop token below": chat(stop_token_ids=[-(10**6)], min_tokens=2),
    "a text for a flag": native({"skip_special_tokens": "x"}),
    "half a token": native({"max_new_tokens": 1.5}),
    "a bias that is no number": native({"logit_bias": {"5": "x"}}),
    "biases in a list": native({"logit_bias": [1]}),
    "a repetition penalty of nearly nothing": native({"repetition_penalty": 1e-300}),
    "a pattern that backtracks for ever": native({"stop_regex": "(a+)+b", "logit_bias": {"67": 100}}),
    "another": chat(stop_regex="a?" * 30 + "b"),
    "embeddings from outside": native(positional_embed_overrides={"a": 1}),
    "places of tokens behind a cached prefix": native(
        {"max_new_tokens": 0}, token_indices_to_pool=[1], return_logprob=True, token_ids_logprob=[5]
    ),
    "an adapter's id from outside": native(lora_id=[]),
}
"""Each of these ends a process of SGLang 0.5.21, or keeps its scheduler busy for ever."""

MISTAKES = {
    "n": native({"n": 10_000}),
    "n of a chat": chat(n=10_000),
    "no samples": completion(n=0),
    "fewer than none": native({"n": -3}),
    "n as a text": native({"n": "two"}),
    "an unknown parameter": native({"foo": 1}),
    "a temperature in words": native({"temperature": "hot"}),
    "a stop number": native({"stop": 5}),
    "half a pattern": native({"stop_regex": "("}),
    "a list of stop lists": native({"stop_token_ids": [[1]]}),
    "no parameters in a list": native(sampling_params=[]),
    "one parameter object for two": native(input_ids=[[5], [6]], sampling_params=[{}]),
    "one number for two": native(input_ids=[[5], [6]], return_logprob=True, top_logprobs_num=[1]),
    "text and ids that disagree": native(text=["a"]),
    "no vectors": native(input_ids=None, input_embeds=[[]]),
    "an id in a list": native(rid=["a"]),
    "an id over two lines": native(rid="a\nb"),
    "an id of a health check": native(rid="HEALTH_CHECK_1"),
    "an endless id": chat(rid="x" * 10**5),
    "an endless salt": chat(cache_salt="x" * 10**5),
    "a priority": chat(priority=2**63),
    "a session's parameter": native(session_params={"foo": 5}),
    "a time to come": native(received_time=1e18),
    "depths": native({"custom_params": {"a": DEEP}}),
    "depths of a session": native(session_params={"a": DEEP}),
    "a huge integer": completion(prompt=[2**63]),
    "null": ("/v1/chat/completions", None),
    "a list": ("/v1/chat/completions", []),
    "a format that is a number": chat(response_format=5),
    "a template's own argument": chat(chat_template_kwargs={"tokenize": 1}),
    "a template of its own": chat(chat_template_kwargs={"chat_template": "a"}),
    "a template for a response": ("/v1/responses", {"input": "a", "chat_template_kwargs": {"chat_template": "a"}}),
    "no messages": ("/v1/messages/count_tokens", {"model": "m", "messages": []}),
    "no messages for Ollama": ("/api/chat", {"model": "m", "messages": [], "stream": False}),
    "a token below zero": ("/v1/detokenize", {"tokens": [-1]}),
    "a token beyond 64 bits": ("/v1/detokenize", {"tokens": [[2**63]]}),
    "an unknown parser": ("/separate_reasoning", {"text": "a", "reasoning_parser": "x"}),
    "an unknown tool parser": ("/parse_function_call", {"text": "a", "tools": [], "tool_call_parser": "x"}),
    "pairs for no cross encoder": ("/encode", {"text": [["a", "b"]]}),
    "an unknown parameter for Vertex": ("/vertex_generate", {"instances": [{"text": "a"}], "parameters": {"foo": 1}}),
}
"""SGLang answers these with 500, serves them without bound, or says 200 to what it did not do."""

ADMINISTRATORS = {
    "a profile of each stage": ("/start_profile", {"profile_by_stage": True, "num_steps": 1}),
    "a profile that nobody can write": ("/start_profile", {"output_dir": "/proc/none", "num_steps": 1}),
    "a profile of another device": ("/start_profile", {"activities": ["MEM"], "num_steps": 1}),
    "no profile to stop": ("/stop_profile", {}),
    "no corpus": ("/remove_external_corpus", []),
}
"""The first three end the scheduler, at once or with the next request; the others are 500."""

_SENSE = since("0.5.21", "a 400 for some bodies that make no sense")
_ENDPOINT = since("0.5.21", "this endpoint")
LATER = {
    "places of tokens behind a cached prefix": since("0.5.21", "token_indices_to_pool"),
    "/v1/completions": _SENSE,
    "/v1/score": _SENSE,
    "/v1/decisions": _ENDPOINT,
    "/v1/systemone": _ENDPOINT,
}
"""What older versions of SGLang lack, by the name of a case."""


def cases(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=LATER.get(name, ())) for name in names]
