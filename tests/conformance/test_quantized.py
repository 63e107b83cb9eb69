"""The KV that a quantized checkpoint asks for is what SGLang's own classes read in it, in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_hybrid.core.presets import PUBLISHED
from sglang_hybrid.core.quantized import SCALED, asked_kv_dtype
from sglang_hybrid.core.spec import from_config
from sglang_hybrid.engine import compat

SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}, "ignore": []}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": []}
MODELOPT4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [], "group_size": 16}
OLDER = {"quantization": {"quant_algo": "FP8", "exclude_modules": []}}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tensors": ("compressed-tensors", {**COMPRESSED, "kv_cache_scheme": SCHEME}),
    "tensors say nothing": ("compressed-tensors", {**COMPRESSED, "kv_cache_scheme": None}),
    "tensors, dynamic": ("compressed-tensors", {**COMPRESSED, "kv_cache_scheme": {**SCHEME, "dynamic": True}}),
    "tensors, by channel": ("compressed-tensors", {**COMPRESSED, "kv_cache_scheme": {**SCHEME, "strategy": "channel"}}),
    "tensors, asymmetric": ("compressed-tensors", {**COMPRESSED, "kv_cache_scheme": {**SCHEME, "symmetric": False}}),
    "fp8": ("fp8", FP8),
    "fp8 and its KV": ("fp8", {**FP8, "kv_cache_quant_algo": "fp8"}),
    "fp8, a scheme nobody reads": ("fp8", {**FP8, "kv_cache_scheme": SCHEME}),
    "modelopt": ("modelopt_fp8", {**MODELOPT, "kv_cache_scheme": {"type": "float", "num_bits": 8}}),
    "modelopt by name": ("modelopt_fp8", {**MODELOPT, "kv_cache_quant_algo": "FP8"}),
    "modelopt says nothing": ("modelopt_fp8", MODELOPT),
    "modelopt, 4 bits": ("modelopt_fp4", {**MODELOPT4, "kv_cache_scheme": "FP8"}),
    "modelopt, KV of 4 bits": ("modelopt_fp4", {**MODELOPT4, "kv_cache_scheme": {"type": "float", "num_bits": 4}}),
    "modelopt, older": ("modelopt_fp8", {"quantization": {**OLDER["quantization"], "kv_cache_quant_algo": "FP8"}}),
    "modelopt, older, says nothing": ("modelopt_fp8", OLDER),
}
NEWER = ("tensors", "fp8 and its KV")
"""Not heard by 0.5.17."""

SCRIPT = """
import json, sys
from sglang_hybrid.engine.cpu import vision
vision.install()
from sglang.srt.layers.quantization import get_quantization_config
said = [get_quantization_config(name).from_config(config) for name, config in json.load(sys.stdin)]
print(json.dumps([getattr(each, "kv_cache_quant_algo", None) for each in said]))
"""


@pytest.fixture(scope="module")
def sglang_reads() -> dict[str, str | None]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=json.dumps(list(CASES.values())), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_the_checkpoint_asks_for_what_sglang_hears(case: str, sglang_reads: dict[str, str | None]) -> None:
    if case in NEWER and compat.engine_version() == "0.5.17":
        pytest.skip("not heard by this SGLang")
    heard = sglang_reads[case]
    scaled = heard is not None and heard.upper() == "FP8"  # so does configure_kv_cache_dtype decide
    assert asked_kv_dtype({"quantization_config": CASES[case][1]}) == (SCALED if scaled else None)


@pytest.mark.parametrize("where", ["quantization_config", "compression_config", "text_config", "a file beside it"])
def test_its_tokens_have_half_the_bytes_wherever_it_is_said(where: str, tmp_path: Path) -> None:
    config = dict(PUBLISHED["qwen3-next-80b-a3b"])
    plain, said = from_config(config), CASES["modelopt by name"][1]
    if where == "a file beside it":
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(CASES["modelopt, older"][1]))
    else:
        config[where] = {**config, "quantization_config": said} if where == "text_config" else said
    (tmp_path / "config.json").write_text(json.dumps(config))
    for source in (tmp_path, tmp_path / "config.json", str(tmp_path)):
        spec = from_config(source)
        assert (spec.kv_dtype, 2 * spec.kv_bytes_per_token) == (SCALED, plain.kv_bytes_per_token)
        assert from_config(source, kv_dtype="bfloat16").kv_bytes_per_token == plain.kv_bytes_per_token


@pytest.mark.parametrize("said", ["FP8", 8, [], {"kv_cache_scheme": 8}, {"quant_algo": 1, "kv_cache_quant_algo": []}])
def test_what_is_not_understood_asks_for_nothing(said: object) -> None:
    assert asked_kv_dtype({"quantization_config": said, "text_config": said}) is None
