"""A host tier that cannot work is refused before anything starts; on a CPU it gets the settings that do."""

from __future__ import annotations

import argparse
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.presets import PUBLISHED
from sglang_hybrid.core.spec import from_config
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.hicache import checks, copies
from sglang_hybrid.engine.launch import arguments, flags, models
from tests.engine.configs import LLAMA, QWEN3_NEXT, write
from tests.versions import served, since


def completed(folder: Path, config: dict[str, Any], *more: str) -> Any:
    path = str(write(folder, config))
    rest = ["--model-path", path, "--enable-hierarchical-cache", *more]
    model = models.inspect_model(argparse.Namespace(model_path=path, load_format="auto"))
    return arguments.complete(flags.parse_engine(rest), rest, HybridConfig(), model)[1]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")


@served("a host tier on a CPU")
@pytest.mark.usefixtures("on_cpu")
def test_a_cpu_gets_plain_copies_and_a_ratio(tmp_path: Path) -> None:
    parsed = completed(tmp_path, QWEN3_NEXT)
    assert (parsed.hicache_io_backend, parsed.hicache_mem_layout) == ("direct", "page_first_direct")
    assert parsed.hicache_ratio == 2.0
    assert completed(tmp_path, QWEN3_NEXT, "--hicache-ratio", "0.5").hicache_ratio == 0.5
    assert completed(tmp_path, QWEN3_NEXT, "--hicache-size", "1").hicache_ratio is None


@served("a host tier on a CPU")
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("rest", "reason"),
    [
        (("--disable-radix-cache",), "no cache to back"),
        (("--disaggregation-mode", "decode"), "KV of a server that decodes was not run"),
        (("--hicache-io-backend", "kernel"), "plain copies only"),
        (("--hicache-mem-layout", "page_first"), "plain copies only"),
        (("--hicache-storage-backend", "mooncake"), "files are the only storage"),
        (("--hicache-host-memory-mode", "buffer_only"), "stages no recurrent states"),
        (("--hicache-ratio", "-1"), "more than zero"),
        (("--hicache-size", "-2"), "more than zero"),
        (("--hicache-size", "100000"), "the size is in GB, and this machine has"),
    ],
)
def test_what_cannot_work_is_refused_with_the_flag(tmp_path: Path, rest: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        completed(tmp_path, QWEN3_NEXT, *rest)
    assert " ".join(rest) in str(refused.value)


@served("a host tier on a CPU")
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("name", "left"), [("Qwen4Exp", "n-gram convolution"), ("Glm5Next", "index of its attention")])
def test_a_model_of_which_a_part_stays_on_the_device_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, left: str
) -> None:
    """SGLang copies an index and the states of n-grams from 0.5.23 on (its `hybrid_pool_assembler.py`)."""
    config = QWEN3_NEXT | {"architectures": [f"{name}ForConditionalGeneration"]}
    write(tmp_path, config)
    model = models.Model(str(tmp_path), config)
    namespace = flags.parse_engine(["--model-path", str(tmp_path), "--enable-hierarchical-cache"])
    namespace.radix_cache_backend = None
    monkeypatch.setattr(compat, "engine_version", lambda: "0.5.21")
    with pytest.raises(ConfigError, match=rf"0\.5\.21 leaves .*{left} on the device.* install 0\.5\.23 .*{name}"):
        checks.check(namespace, model, False)
    monkeypatch.setattr(compat, "engine_version", lambda: "0.5.23")
    checks.check(namespace, model, False)


def test_a_storage_with_one_state_for_all_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank of Kimi-Linear would go on from the state of rank 0 (SGLang's `nixl` before 0.5.23, `hf3fs`)."""
    kimi = models.Model("kimi", QWEN3_NEXT, from_config(PUBLISHED["kimi-linear-48b-a3b"]))
    qwen = models.Model("qwen", QWEN3_NEXT, from_config(PUBLISHED["qwen3-next-80b-a3b"]))

    def check(model: models.Model, *more: str) -> None:
        rest = ["--model-path", "kimi", "--enable-hierarchical-cache", "--hicache-mem-layout", "page_first", *more]
        namespace = flags.parse_engine(rest)
        namespace.radix_cache_backend = None
        checks.check(namespace, model, False)

    monkeypatch.setattr(compat, "engine_version", lambda: "0.5.21")
    for storage in ("nixl", "hf3fs"):
        with pytest.raises(ConfigError, match=f"that of rank 0; choose file or mooncake: .*{storage}"):
            check(kimi, "--hicache-storage-backend", storage, "--tp-size", "2")
        check(kimi, "--hicache-storage-backend", storage)
        check(qwen, "--hicache-storage-backend", storage, "--tp-size", "2")
    check(kimi, "--hicache-storage-backend", "mooncake", "--tp-size", "2")
    check(kimi, "--hicache-storage-backend", "nixl", "--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
    monkeypatch.setattr(compat, "engine_version", lambda: "0.5.23")
    check(kimi, "--hicache-storage-backend", "nixl", "--tp-size", "2")


@since("0.5.23", "host pools of an index and of what lies beside the states")
def test_this_sglang_copies_all_of_a_state_to_the_host() -> None:
    pools = importlib.import_module("sglang.srt.mem_cache.memory_pool")
    assert "make_dsa_indexer_pool_decl" in inspect.getsource(pools.DSATokenToKVPool.host_pool_decls)
    assert "_slot_siblings" in inspect.getsource(pools.MambaPool.get_device_pool_infos)


@served("a host tier on a CPU")
def test_a_folder_of_storage_that_nobody_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang finds out in the scheduler, once the model is loaded."""
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "kept", tmp_path / "file"):
        monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(folder))
        with pytest.raises(ConfigError, match=f"STORAGE_DIR: {folder}$"):
            completed(tmp_path, QWEN3_NEXT, "--hicache-storage-backend", "file")


@pytest.mark.usefixtures("on_cpu")
def test_another_version_is_refused_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "engine_version", lambda: "0.5.17")
    with pytest.raises(ConfigError, match="on a CPU it was run with"):
        completed(tmp_path, QWEN3_NEXT)


@pytest.mark.parametrize("on_cpu", [False, True])
def test_a_version_without_our_guards_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cpu: bool) -> None:
    """SGLang's restore ends the scheduler where it finds no slot, or computes on from zeros (docs/upstream.md)."""
    model = models.inspect_model(argparse.Namespace(model_path=str(write(tmp_path, QWEN3_NEXT)), load_format="auto"))
    layout = copies.LAYOUT if on_cpu else "page_first"
    namespace = argparse.Namespace(
        enable_hierarchical_cache=True, disable_radix_cache=False, hicache_ratio=2.0, hicache_size=0,
        hicache_mem_layout=layout, hicache_io_backend=copies.IO_BACKEND, hicache_storage_backend=None,
        disaggregation_mode="null", radix_cache_backend="hybrid",
    )  # fmt: skip
    for version in compat.COMPLETE:
        monkeypatch.setattr(compat, "engine_version", lambda version=version: version)
        checks.check(namespace, model, on_cpu)
    monkeypatch.setattr(compat, "engine_version", lambda: "0.5.22")
    with pytest.raises(ConfigError, match=r"install SGLang 0\.5\.21 or 0\.5\.23, or drop the flag: 0\.5\.22"):
        checks.check(namespace, model, on_cpu)
    namespace.radix_cache_backend = None  # SGLang's own cache, by the user's choice
    checks.check(namespace, model, on_cpu)


def test_states_lie_page_by_page(tmp_path: Path) -> None:
    settings = {
        "enable_hierarchical_cache": True, "disable_radix_cache": False, "hicache_ratio": None, "hicache_size": 0,
        "hicache_mem_layout": "layer_first", "disaggregation_mode": "null",
    }  # fmt: skip
    for config in (LLAMA, QWEN3_NEXT):
        model = models.inspect_model(argparse.Namespace(model_path=str(write(tmp_path, config)), load_format="auto"))
        if config is LLAMA:
            checks.check(argparse.Namespace(**settings), model, False)
        else:
            with pytest.raises(ConfigError, match="page by page"):
                checks.check(argparse.Namespace(**settings), model, False)


@pytest.mark.parametrize(("policy", "told"), [("best_effort", True), ("timeout", False), ("wait_complete", False)])
def test_a_policy_that_serves_nothing_from_storage_is_named(tmp_path: Path, policy: str, told: bool) -> None:
    storage = ("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", policy)
    folder = write(tmp_path, QWEN3_NEXT)
    namespace = flags.parse_engine(["--model-path", str(folder), "--enable-hierarchical-cache", *storage])
    model = models.inspect_model(argparse.Namespace(model_path=str(folder), load_format="auto"))
    note = checks.note(namespace, model)
    assert ("best_effort" in note) == told
