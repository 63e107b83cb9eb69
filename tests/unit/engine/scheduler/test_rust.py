"""SGLang's server in Rust: what is refused with it, and what its requests are checked for."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.launch import rust
from sglang_hybrid.engine.scheduler import rust as hooks
from sglang_hybrid.engine.scheduler.ids import RequestId
from tests.versions import since

NEWER = since("0.5.21", "fields that requests of its server in Rust have")

PLAIN: dict[str, Any] = dict.fromkeys(("api_key", "admin_api_key", "ssl_keyfile", "ssl_certfile"))
PLAIN["disaggregation_mode"] = "null"


@pytest.fixture(autouse=True)
def newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rust.VARIABLE, "1")
    monkeypatch.setattr(compat, "engine_version", lambda: rust.OLDEST)


@pytest.mark.parametrize(
    ("given", "segments", "message"),
    [
        ({"api_key": "k"}, "off", "no TLS; put a proxy in front and drop the flag, or unset .*: --api-key"),
        ({"admin_api_key": "k"}, "off", "--admin-api-key"),
        ({"ssl_keyfile": "/k"}, "off", "--ssl-keyfile"),
        ({"disaggregation_mode": "prefill"}, "off", "unset SGLANG_RUST_SERVER or drop: --disaggregation-mode prefill"),
        ({}, "on", "--hybrid-segments on"),
    ],
)
def test_what_it_would_ignore_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], segments: str, message: str
) -> None:
    namespace, config = SimpleNamespace(**{**PLAIN, **given}), HybridConfig(segments=segments)
    with pytest.raises(ConfigError, match=message):
        rust.check(namespace, config)
    for value in ("", "0", "false"):
        monkeypatch.setenv(rust.VARIABLE, value)
        rust.check(namespace, config)
        assert (rust.features(), rust.note()) == ([], None)


def test_versions_that_drop_cache_salts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rust.check(SimpleNamespace(**PLAIN), HybridConfig())
    assert rust.features() == ["rust"]
    monkeypatch.setattr(compat, "engine_version", lambda: "0.5.21")
    with pytest.raises(ConfigError, match=r"tenants would share a cache; use SGLang 0\.5\.23 or unset .*: 0\.5\.21"):
        rust.check(SimpleNamespace(**PLAIN), HybridConfig())


def test_ids_are_encoded_as_texts() -> None:
    payload = SimpleNamespace(rids=[RequestId("a"), "b"])
    with pytest.raises(TypeError):
        msgspec.msgpack.encode(payload.rids)
    hooks.plain_ids(None, payload, {})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(payload.rids)) == ["a", "b"]
    abort = SimpleNamespace(rid=RequestId("a"))
    hooks.plain_id(None, abort, None)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(abort.rid)) == "a"


def came(sampling: dict[str, Any] | None = None, **fields: Any) -> Any:
    """A request as the scheduler decodes it."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    given = {"rid": "r", "input_ids": array("q", [3, 4, 5]), "return_logprob": False, "logprob_start_len": -1}
    given |= dict.fromkeys(("token_ids_logprob", "token_indices_to_pool", "priority", "extra_key"))
    given["top_logprobs_num"] = 0
    return SimpleNamespace(**{**given, "sampling_params": SamplingParams(**sampling or {}), **fields})


MODEL = SimpleNamespace(vocab_size=320, context_len=4096, is_multimodal=False)
ARGS = SimpleNamespace(disable_radix_cache=False, chunked_prefill_size=-1)


def required(obj: Any) -> None:
    server = SimpleNamespace()
    hooks.meet(None, SimpleNamespace(rust_server=None))
    hooks.meet(None, SimpleNamespace(rust_server=server, model_config=MODEL, server_args=ARGS))
    hooks.require(None, server, obj, {})


@NEWER
@pytest.mark.parametrize(
    ("sampling", "fields", "message"),
    [
        ({}, {"top_logprobs_num": 321}, "from 0 to 320: 321"),
        ({}, {"input_ids": array("q", [320])}, "0 to 319: 320"),
        ({}, {"input_ids": array("q", [-1])}, "0 to 319: -1"),
        ({}, {"token_indices_to_pool": [1]}, "start the server with --disable-radix-cache"),
        ({}, {"rid": "r" * 257}, "rid has 1 to 256 characters"),
        ({}, {"extra_key": "k" * 1025}, "extra_key is a text"),
        ({}, {"priority": 2**31}, "priority is a whole number"),
        ({"stop": ["s" * 1025]}, {}, "stop has at most"),
        ({"stop_regex": "(a+)+" * 60}, {}, "stop_regex"),
        ({"logit_bias": {"320": 1.0}}, {}, "logit_bias names tokens"),
        ({"logit_bias": {"3": 1e39}}, {}, "logit_bias is a number"),
        ({"repetition_penalty": 1e-9}, {}, "repetition_penalty is at least"),
        ({"regex": "a" * 65_537}, {}, "regex has at most"),
        ({"custom_params": {"cache_boundaries": [9]}}, {}, "which has 3 tokens"),
        (
            {"max_new_tokens": 4000},
            {"return_logprob": True, "top_logprobs_num": 320, "input_ids": array("q", [1] * 90)},
            "",
        ),
    ],
)
def test_a_request_is_checked(sampling: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    obj = came(sampling, **fields)
    if not message:
        required(obj)  # as much as is allowed
        return
    with pytest.raises(ConfigError, match=message):
        required(obj)


@NEWER
def test_what_needs_no_check_passes() -> None:
    required(came())
    required(
        came({"stop": ["x"], "temperature": 0.5, "top_k": -1, "n": 1, "custom_params": {"mine": [1, {"a": None}]}})
    )
    required(SimpleNamespace(rid="r"))  # an abort
    required(came(input_ids=None))


@NEWER
def test_what_sglang_has_normalized_is_checked() -> None:
    obj = came({"stop": ["s" * 1025]})
    obj.sampling_params.stop = None  # it is in stop_strs by then
    with pytest.raises(ConfigError, match="stop has at most"):
        required(obj)
