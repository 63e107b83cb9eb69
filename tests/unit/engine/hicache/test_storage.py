"""Storage behind the host tier: whose entries are used, and what a storage that fails costs."""

from __future__ import annotations

import errno
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hybrid.engine import compat
from sglang_hybrid.engine.hicache import storage
from sglang_hybrid.engine.launch import fingerprint, server_name

pytestmark = [
    pytest.mark.filterwarnings("ignore::Warning:sglang"),
    pytest.mark.skipif(not compat.complete(), reason="other versions are refused"),
]


@dataclass
class Config:
    model_name: str | None
    is_mla_model: bool = False


class Broken:
    """A storage whose every answer is a failure."""

    def fail(self, *_: Any, **__: Any) -> Any:
        raise OSError("the disk is gone")

    exists = get = set = batch_exists = batch_exists_v2 = batch_get = batch_get_v1 = batch_get_v2 = fail
    batch_set = batch_set_v1 = batch_set_v2 = fail


@pytest.fixture(autouse=True)
def weights_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_updates", 0)
    monkeypatch.setenv(fingerprint.ENVIRONMENT_KEY, "aa")
    monkeypatch.delenv(fingerprint.QUANTIZED_KEY, raising=False)
    monkeypatch.setenv(server_name.ENVIRONMENT_KEY, "server")


def controller(
    dtype: str = "float32", layout: str = "page_first", backend: Any = None, kv: str = "float32", pools: str = "kv"
) -> Any:
    host = SimpleNamespace(dtype=dtype, layout=layout, size_per_token=64, device_pool=SimpleNamespace(dtype=kv))
    entries = [SimpleNamespace(name=pool, host_pool=host) for pool in pools.split()]
    group = SimpleNamespace(entries=entries)
    return SimpleNamespace(mem_pool_host=group, storage_backend=backend, storage_backend_type="file")


def files(folder: Path, **extra: Any) -> Any:
    """A guarded folder of files, of rank 0 of 1."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

    config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, False, "m", extra_config=extra)
    made = controller(backend=HiCacheFile(config, str(folder)))
    storage.guard(None, made)
    return made.storage_backend


def name(of: Any) -> str:
    told = storage.name(Config("models/m"), of).model_name
    assert isinstance(told, str)
    return told


def test_entries_are_those_of_the_same_weights_types_and_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = name(controller())
    assert mine.startswith("models/m@")
    assert name(controller()) == mine
    assert name(controller(dtype="bfloat16")) != mine
    assert name(controller(layout="page_first_direct")) != mine
    assert name(controller(kv="float8_e5m2")) != mine, "its bytes are of one type with those of float8_e4m3fn"
    alone = SimpleNamespace(mem_pool_host=controller().mem_pool_host.entries[0].host_pool)
    assert name(alone) == mine, "a pool that is in no group"
    monkeypatch.setenv(fingerprint.QUANTIZED_KEY, '["fp8"]')
    assert name(controller()) != mine, "KV of quantized weights"
    monkeypatch.delenv(fingerprint.QUANTIZED_KEY)
    monkeypatch.setenv(fingerprint.ENVIRONMENT_KEY, "bb")
    assert name(controller()) != mine


def test_a_storage_attached_behind_an_update_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = name(controller())
    storage.weights_change(None, "disk")
    updated = name(controller())
    assert updated != mine
    monkeypatch.setenv(server_name.ENVIRONMENT_KEY, "another")
    assert name(controller()) != updated


def test_a_failure_is_a_miss_and_is_said_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolTransferResult

    made = controller(backend=Broken())
    storage.guard(None, made)
    asked, states = made.storage_backend, [SimpleNamespace(name="mamba", keys=["a", "b"])]
    with caplog.at_level(logging.ERROR):
        assert asked.batch_exists(["a"]) == 0
    assert asked.batch_exists_v2(["a"], states) == PoolTransferResult.empty()
    assert asked.batch_get(["a", "b"], [1, 2]) == [None, None]
    assert asked.batch_get_v1(["a", "b"], [1, 2]) == [False, False]
    assert asked.batch_get_v2(states, extra_info=None) == {"mamba": [False, False]}
    assert asked.batch_set(["a"], [1]) is False
    assert asked.batch_set_v1(["a"], [1]) == [False]
    assert asked.batch_set_v2(states) == {"mamba": [False, False]}
    assert asked.get("a", 1) is None
    assert asked.set("a", 1) is False
    assert asked.exists("a") is False
    [said] = [record.getMessage() for record in caplog.records]
    assert "Broken failed" in said
    assert "the disk is gone" in said


def test_a_file_that_a_full_disk_cuts_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NumPy reports no error for a few bytes: the name would count as stored, and not be written again."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    def full(storage: Any, key: str, value: torch.Tensor) -> bool:
        Path(storage.file_path, f"{storage._get_suffixed_key(key)}.bin").touch()
        return True

    with monkeypatch.context() as patched:
        patched.setattr(HiCacheFile, "set", full)
        asked = files(tmp_path / "kept")
    assert asked.set("a", torch.arange(8.0)) is False
    assert not list((tmp_path / "kept").glob("*.bin"))
    assert not asked.exists("a")
    assert "is the disk full" in caplog.text


@pytest.mark.parametrize("remembered", [False, True])
def test_a_file_that_was_cut_is_written_again(tmp_path: Path, remembered: bool) -> None:
    """SGLang writes no file that is there: the prefix behind it would miss for ever."""
    asked = files(tmp_path / "kept", metadata_ttl=600, enable_metadata_cache=remembered)
    page, room = torch.arange(8.0), torch.zeros(8)
    assert asked.set("a", page)
    [file] = (tmp_path / "kept").glob("*.bin")
    file.write_bytes(file.read_bytes()[:5])
    assert asked.get("a", room) is None
    assert not asked.exists("a")
    assert asked.set("a", page)
    assert torch.equal(asked.get("a", room), page)


@pytest.mark.parametrize("damage", ["a bit", "zeros", "another page", "another server's"])
def test_a_file_of_the_right_size_with_other_content_is_removed(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang reads whatever lies under the name: KV and states that are not those of the prompt, wrong answers."""
    asked, room = files(tmp_path), torch.full((2, 4), 7, dtype=torch.bfloat16)
    page = torch.arange(8, dtype=torch.bfloat16).reshape(2, 4)
    assert asked.set("a", page)
    assert asked.set("b", page)
    [file], [other] = tmp_path.glob("a_*"), tmp_path.glob("b_*")
    content = bytearray(file.read_bytes())
    content[3] ^= 16
    file.write_bytes({"a bit": bytes(content), "zeros": bytes(len(content))}.get(damage, other.read_bytes()))
    if damage == "another server's":
        file = file.rename(str(file).replace("_m_", "_n_"))
        asked._get_suffixed_key = lambda key: f"{key}_n_0_1"
    with caplog.at_level(logging.ERROR):
        assert asked.get("a", room) is None
    assert f"damaged file, which was removed, and its tokens are computed: {file}" in caplog.text
    assert torch.equal(room, torch.full_like(room, 7)), "nothing of it is left behind"
    assert asked.set("a", page)
    assert torch.equal(asked.get("a", room), page)


def test_what_a_killed_server_had_begun_to_write_is_removed(tmp_path: Path) -> None:
    old, new = tmp_path / ".ab12.tmp", tmp_path / ".cd34.tmp"
    for file in (old, new):
        file.write_bytes(b"half")
    os.utime(old, (0, time.time() - 2 * storage.HALF_WRITTEN_S))
    files(tmp_path).set("a", torch.arange(8.0))
    assert not old.exists()
    assert new.exists(), "a server that lives may be writing it"


def test_ranks_share_no_state_where_they_share_the_latents() -> None:
    """Before 0.5.23 SGLang has one file for the states of all ranks: each would go on from those of rank 0."""
    told = storage.name(Config("kimi", is_mla_model=True), controller(pools="kv mamba"))
    assert told.is_mla_model is compat.at_least("0.5.23")
    assert storage.name(Config("deepseek", is_mla_model=True), controller(pools="kv")).is_mla_model
    elsewhere = controller(pools="kv mamba")
    elsewhere.storage_backend_type = "mooncake"
    assert storage.name(Config("kimi", is_mla_model=True), elsewhere).is_mla_model, "it names the rank itself"


def test_a_file_that_could_not_be_opened_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = files(tmp_path / "kept")
    assert asked.set("a", torch.arange(8.0))
    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", Broken().fail)
        assert asked.get("a", torch.zeros(8)) is None
    assert torch.equal(asked.get("a", torch.zeros(8)), torch.arange(8.0))


def test_a_full_disk_is_said_once_in_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang logs two lines of every page that it cannot write, of which a prompt has hundreds."""
    from sglang.srt.mem_cache import hicache_storage as theirs

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    asked = files(tmp_path / "kept")
    monkeypatch.setattr(theirs.os, "replace", full)
    with caplog.at_level(logging.INFO):
        theirs.logger.info("what else it says")
        for page in range(20):
            assert asked.set(f"page {page}", torch.arange(8.0)) is False
            assert asked.get(f"page {page}", torch.zeros(8)) is None
    first, said = [record.getMessage() for record in caplog.records]
    assert first == "what else it says"
    assert "page 0: [Errno 28] No space left" in said
    assert list((tmp_path / "kept").iterdir()) == [], "nothing half written stays"


def test_what_other_weights_computed_is_neither_read_nor_added_to(caplog: pytest.LogCaptureFixture) -> None:
    kept = {"a": 1}
    backend = SimpleNamespace(get=kept.get, exists=kept.__contains__, batch_exists=len, set=kept.__setitem__)
    backend.set("b", 2)
    made = controller(backend=backend)
    storage.guard(None, made)
    assert made.storage_backend.get("a") == 1
    storage.weights_change(None, "tensor")
    assert made.storage_backend.get("a") is None
    assert made.storage_backend.set("c", 3) is False
    assert made.storage_backend.batch_exists(["a"]) == 0
    assert kept == {"a": 1, "b": 2}
    assert "other weights" in caplog.text


def test_every_call_of_sglangs_threads_is_guarded() -> None:
    """What its controllers ask of a storage stands in `NOTHING`; a new version may ask more."""
    import inspect
    import re

    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller

    asked = {
        call
        for module in (cache_controller, hybrid_cache_controller)
        for call in re.findall(r"storage_backend\.(\w+)\(", inspect.getsource(module))
    }
    administration = {"clear", "close", "register_mem_pool_host", "register_mem_host_pool_v2"}
    assert asked - administration - {"on_host_pools_registered"} <= set(storage.NOTHING)
    assert {"batch_exists_v2", "batch_get", "batch_get_v2", "batch_set"} <= asked
