"""What segments cannot be served with, before a model is loaded."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.layers import LatentAttention
from sglang_hybrid.core.models import find_model
from sglang_hybrid.core.spec import from_config
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.segments import build, forward, hooks, refusals
from tests.engine.configs import INDEX, QWEN3_NEXT
from tests.versions import served

pytestmark = served("segments")

MODEL = find_model("qwen3-next-80b-a3b")


def asked(**given: object) -> SimpleNamespace:
    settings = {
        "disaggregation_mode": "null",
        "kv_cache_dtype": "auto",
        "model_path": "m",
        "speculative_algorithm": None,
        "speculative_draft_model_path": None,
    }
    return SimpleNamespace(**(settings | given))


@pytest.mark.parametrize("memory", ["static", "elastic"])
def test_tensor_parallel_ranks_have_the_same_entries(memory: str) -> None:
    for ranks in (1, 2):
        refusals.check(asked(tp_size=ranks), HybridConfig(segments="on", memory=memory), MODEL)
    with pytest.raises(ConfigError, match=r"only tensor-parallel ones agree about entries; .*: --dp-size 2"):
        refusals.check(asked(tp_size=2, dp_size=2), HybridConfig(segments="on", memory=memory), MODEL)


@pytest.mark.parametrize("algorithm", ["NGRAM", "ngram", "NEXTN", "eagle"])
def test_n_grams_and_a_models_own_head_draft_beside_segments(algorithm: str) -> None:
    for path in (None, "m"):  # SGLang names the model itself
        drafts = asked(speculative_algorithm=algorithm, speculative_draft_model_path=path)
        refusals.check(drafts, HybridConfig(segments="on"), MODEL)


@pytest.mark.parametrize(
    ("given", "reason", "value"),
    [
        ({"speculative_algorithm": "EAGLE3"}, "a model's own head have seams", "--speculative-algorithm EAGLE3"),
        ({"speculative_algorithm": "STANDALONE"}, "own head have seams", "--speculative-algorithm STANDALONE"),
        ({"speculative_draft_model_path": "other"}, "own head has seams", "--speculative-draft-model-path other"),
        ({"enable_multi_layer_eagle": True}, "of several steps were not tried", "--enable-multi-layer-eagle"),
    ],
)
def test_what_else_drafts_has_no_seams(given: dict[str, object], reason: str, value: str) -> None:
    drafts = asked(**({"speculative_algorithm": "NEXTN"} | given))
    with pytest.raises(ConfigError, match=f"{reason}; .*: {value}$"):
        refusals.check(drafts, HybridConfig(segments="on"), MODEL)


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({"enable_return_hidden_states": True}, "--enable-return-hidden-states"),
        ({"return_hidden_states_mode": "last"}, "--return-hidden-states-mode"),
        ({"schedule_policy": "shortest-prefill-first"}, "--schedule-policy shortest-prefill-first"),
        ({"prefill_decode_interval": 4}, "--prefill-decode-interval"),
        (
            {"speculative_algorithm": "NEXTN", "speculative_draft_kv_cache_dtype": "fp8_e4m3"},
            "--speculative-draft-kv-cache-dtype fp8_e4m3",
        ),
    ],
)
def test_what_a_composed_pass_would_end_the_scheduler_with_is_refused(given: dict[str, object], value: str) -> None:
    """Rows of other requests, chunks that end nowhere, heads whose KV is of another type."""
    with pytest.raises(ConfigError, match=f"drop --hybrid-segments: {value}$"):
        refusals.check(asked(**given), HybridConfig(segments="on"), MODEL)
    others = {"schedule_policy": "lpm", "prefill_decode_interval": 0, "speculative_draft_kv_cache_dtype": "bfloat16"}
    refusals.check(asked(**{**others, "kv_cache_dtype": "bfloat16"}), HybridConfig(segments="on"), MODEL)


@pytest.mark.parametrize(
    ("given", "value"),
    [({"lora_paths": ["a=b"]}, "--lora-paths"), ({"rl_on_policy_target": "fsdp"}, "--rl-on-policy-target")],
)
def test_a_flag_that_implies_a_refused_one_is_refused(given: dict[str, object], value: str) -> None:
    """What SGLang makes of its flags is not known before it starts."""
    with pytest.raises(ConfigError, match=f"drop --hybrid-segments: {value}$"):
        refusals.check(asked(**given), HybridConfig(segments="on"), MODEL)


def test_keys_that_a_checkpoint_has_scaled_are_refused() -> None:
    for dtype in ("bfloat16", "float16", "float32"):
        build.check_keys(f"torch.{dtype}")
    with pytest.raises(ConfigError, match=r"add --kv-cache-dtype bfloat16 .*: torch\.float8_e4m3fn"):
        build.check_keys("torch.float8_e4m3fn")


def test_a_pause_in_place_ends_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop goes round while the last pass may still run: its entries stay."""
    turns: list[int] = []
    composer = SimpleNamespace(turn=lambda: turns.append(1))
    monkeypatch.setattr(hooks, "composer_of", lambda cache: composer)
    for paused in (False, True, False):
        hooks.turn(SimpleNamespace(tree_cache=None, _engine_paused=paused))
    assert len(turns) == 2


@pytest.mark.parametrize("beside", [{"ple_layer_ids": [1]}, INDEX])
def test_what_is_kept_beside_kv_and_states_is_in_no_entry(beside: dict[str, object]) -> None:
    spec = from_config({**QWEN3_NEXT, "model_type": "qwen4_exp", **beside})
    with pytest.raises(ConfigError, match=r"not the index or the states of n-grams .* beside them; .*: "):
        refusals.check(asked(), HybridConfig(segments="on"), spec)


def test_a_head_over_latents_has_no_seams() -> None:
    drafts = asked(speculative_algorithm="NEXTN")
    with pytest.raises(ConfigError, match=r"a head over latent KV \(MLA\) was not tried; .*: --speculative-algorithm"):
        refusals.check(drafts, HybridConfig(segments="on"), find_model("kimi-linear-48b-a3b"))


def test_latents_are_copied_only_where_that_is_right() -> None:
    kimi, on = find_model("kimi-linear-48b-a3b"), HybridConfig(segments="on")
    refusals.check(asked(), on, kimi)
    for change, reason in (
        ({"rotary": True}, "only where it has no rotary"),
        ({"extra_weights": 9}, "output gate was not"),
    ):
        layers = tuple(replace(each, **change) if isinstance(each, LatentAttention) else each for each in kimi.layers)
        with pytest.raises(ConfigError, match=reason):
            refusals.check(asked(), on, replace(kimi, layers=layers))
    with pytest.raises(ConfigError, match=r"shares no budget .*: --hybrid-memory elastic"):
        refusals.check(asked(), HybridConfig(segments="on", memory="elastic"), kimi)


def test_latents_need_a_backend_that_sees_them_in_every_prefill() -> None:
    for backend in ("TorchNativeAttnBackend", "TritonAttnBackend", "FlashAttentionBackend"):
        build.check_latent(backend, None)
    with pytest.raises(ConfigError, match=r"absorbed in every prefill; add --attention-backend triton .*: TRTLLM"):
        build.check_latent("TRTLLMMLABackend", None)
    with pytest.raises(ConfigError, match="without positions"):
        build.check_latent("TritonAttnBackend", (torch.ones(4), False))


def test_a_pass_of_composed_prompts_sees_latents_absorbed(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    assert hooks.absorbed(AttnForwardMethod.MHA, None, None) is None, "another pass is left as it is"
    monkeypatch.setattr(forward, "running", lambda batch: batch)
    assert hooks.absorbed(AttnForwardMethod.MHA, None, object()) is AttnForwardMethod.MLA


def test_a_composed_pass_leaves_a_graph_that_has_the_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def runner(inside: bool | None, head: bool = False) -> SimpleNamespace:
        backend = SimpleNamespace(supports_prefill_graph_extend=lambda: inside)
        attention = object() if inside is None else SimpleNamespace(linear_attn_backend=backend)
        return SimpleNamespace(model_runner=SimpleNamespace(attn_backend=attention, is_draft_worker=head))

    assert hooks.outside_a_graph(True, runner(True), SimpleNamespace(forward_mode=None)) is None
    monkeypatch.setattr(forward, "running", lambda batch: batch)
    assert hooks.outside_a_graph(True, runner(True), object()) is False
    assert hooks.outside_a_graph(True, runner(False), object()) is None
    assert hooks.outside_a_graph(False, runner(True), object()) is None
    assert hooks.outside_a_graph(True, runner(None), object()) is None
    assert hooks.outside_a_graph(True, runner(None, head=True), object()) is False, "its graph has another backend"


@pytest.mark.parametrize(("version", "flat", "whole"), [("0.5.21", True, False), ("0.5.23", True, True)])
def test_a_strength_is_raw_as_the_version_of_sglang_has_it(
    monkeypatch: pytest.MonkeyPatch, version: str, flat: bool, whole: bool
) -> None:
    monkeypatch.setattr(compat, "engine_version", lambda: version)
    assert compat.is_raw_strength(torch.zeros(1, 5, 6)) is flat
    assert compat.is_raw_strength(torch.zeros(1, 5, 2, 3)) is whole


def test_parts_of_latents_that_come_apart_are_put_together() -> None:
    """SGLang's FlashAttention is given them so, the others [tokens, heads, both]."""
    whole = torch.arange(2 * 3 * 5).view(2, 3, 5)
    assert forward._whole(whole, None) is whole
    for part in (whole[..., :3], whole[..., :3].flatten(1)):
        assert forward._whole(part, whole[..., 3:]).equal(whole)


def test_other_versions_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in compat.COMPLETE:
        monkeypatch.setattr(compat, "engine_version", lambda version=version: version)
        refusals.check(asked(), HybridConfig(segments="on"), MODEL)
    monkeypatch.setattr(compat, "engine_version", lambda: "0.5.22")
    with pytest.raises(ConfigError, match=r"0\.5\.21 and 0\.5\.23 only; .* drop --hybrid-segments: 0\.5\.22"):
        refusals.check(asked(), HybridConfig(segments="on"), MODEL)


def test_servers_that_compute_for_each_other_serve_segments_each_on_one_machine() -> None:
    peers = "http://10.0.0.1:30000,http://10.0.0.2:30000"
    refusals.check(asked(), HybridConfig(segments="on", segment_peers=peers), MODEL)
    with pytest.raises(
        ConfigError, match=r"add --hybrid-segments on or drop --hybrid-segment-peers: http://10\.0\.0\.1"
    ):
        refusals.check(asked(), HybridConfig(segment_peers=peers), MODEL)
    with pytest.raises(ConfigError, match=r"of one machine each; drop --hybrid-segment-peers or --nnodes: 2$"):
        refusals.check(asked(nnodes=2), HybridConfig(segments="on", segment_peers=peers), MODEL)


@pytest.mark.parametrize(
    "peers",
    ["10.0.0.1:30000", "http://", "ftp://a:1", "http://a:99999", "http://a:1/path", "http://a:1,b", "http://[::1"],
)
def test_their_addresses_are_checked(peers: str) -> None:
    with pytest.raises(ConfigError, match=r"segment_peers are addresses such as http://10\.0\.0\.1:30000: "):
        HybridConfig(segment_peers=peers)


def test_addresses_are_read_with_spaces_and_a_slash() -> None:
    config = HybridConfig(segment_peers=" http://a:1/, https://b.example:2 ,,http://[::1]:3")
    assert config.peers == ["http://a:1", "https://b.example:2", "http://[::1]:3"]


def test_a_model_of_convolutions_is_refused_before_the_start() -> None:
    """It has windows and no recurrent part; the scheduler refused it, in a traceback."""
    with pytest.raises(ConfigError, match=r"drop --hybrid-segments: conv$"):
        refusals.check(asked(), HybridConfig(segments="on"), find_model("lfm2-1.2b"))
