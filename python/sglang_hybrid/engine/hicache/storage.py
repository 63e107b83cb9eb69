"""Storage behind the host tier (`--hicache-storage-backend`): KV and states that outlive a server.

SGLang files them under the name of the model, and a storage that fails ends the thread that asked it: every request
that waits for it then waits for ever. Here they are filed under what makes them usable, the weights are those of the
start, and what fails is a miss. A file ends in a checksum of its name and content; one that has another is damaged.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_hybrid.engine import compat
from sglang_hybrid.engine.launch.fingerprint import ENVIRONMENT_KEY as FINGERPRINT
from sglang_hybrid.engine.launch.fingerprint import QUANTIZED_KEY
from sglang_hybrid.engine.launch.server_name import ENVIRONMENT_KEY as SERVER

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile
    from torch import Tensor

SAID_EVERY_S = 10.0
CHECKSUM_BYTES = 4
HALF_WRITTEN_S = 3600.0
"""A file that was begun so long ago was left by a server that was killed; another one may write to the folder now."""

logger = logging.getLogger(__name__)

_updates = 0
"""Updates of the weights so far; they reach the schedulers of all ranks."""


def _no_results(transfers: Any, *_: Any, **__: Any) -> dict[Any, list[bool]]:
    return {each.name: [False] * len(each.keys or ()) for each in transfers}


def _nothing_there(*_: Any, **__: Any) -> Any:
    from sglang.srt.mem_cache.hicache_storage import PoolTransferResult

    return PoolTransferResult.empty()


NOTHING: dict[str, Callable[..., Any]] = {
    "exists": lambda *_, **__: False,
    "get": lambda *_, **__: None,
    "set": lambda *_, **__: False,
    "batch_exists": lambda *_, **__: 0,
    "batch_exists_v2": _nothing_there,
    "batch_get": lambda keys, *_, **__: [None] * len(keys),
    "batch_get_v1": lambda keys, *_, **__: [False] * len(keys),
    "batch_get_v2": _no_results,
    "batch_set": lambda *_, **__: False,
    "batch_set_v1": lambda keys, *_, **__: [False] * len(keys),
    "batch_set_v2": _no_results,
}
"""What a storage says that has nothing and takes nothing, by what SGLang's threads call."""


def weights_change(*_: Any, **__: Any) -> None:
    """BEFORE hook of what every update of weights begins with."""
    global _updates
    _updates += 1


def name(config: Any, controller: Any, *_: Any, **__: Any) -> Any:
    """AFTER hook of HiCacheController._generate_storage_config: entries are of these weights, types and this layout."""
    held = controller.mem_pool_host  # of a pair's server that decodes, or without recurrent states, one pool
    pools = [(str(entry.name), entry.host_pool) for entry in getattr(held, "entries", ())] or [("kv", held)]
    kinds = ("dtype", "conv_dtype", "temporal_dtype", "layout", "size_per_token")
    shapes = sorted((pool, *(str(getattr(host, kind, None)) for kind in kinds), _read_as(host)) for pool, host in pools)
    known = [os.environ.get(FINGERPRINT), os.environ.get(QUANTIZED_KEY), shapes]
    if _updates:  # nobody else has such weights, as far as anybody knows
        known += [os.environ.get(SERVER), _updates]
    told = sha256(json.dumps(known).encode()).hexdigest()[:16]
    named = dataclasses.replace(config, model_name=f"{config.model_name or 'model'}@{told}")
    if config.is_mla_model and _one_file_for_all_ranks(controller) and any(pool == "mamba" for pool, _ in pools):
        return dataclasses.replace(named, is_mla_model=False)  # each rank files what it has, the same latents too
    return named


def _read_as(host: Any) -> str:
    """The type that KV is computed with; a pool calls both kinds of FP8 bytes."""
    return str(getattr(getattr(host, "device_pool", None), "dtype", None))


def _one_file_for_all_ranks(controller: Any) -> bool:
    """Before 0.5.23 a folder of files keeps one state for all ranks of a model with latent attention: rank 0's."""
    return controller.storage_backend_type == "file" and not compat.at_least("0.5.23")


def guard(_: Any, controller: Any, *__: Any, **___: Any) -> None:
    """AFTER hook of HiCacheController.attach_storage_backend."""
    storage, attached = controller.storage_backend, _updates
    failures = _Failures(type(storage).__name__)
    for method, nothing in NOTHING.items():
        if hasattr(storage, method):
            setattr(storage, method, _guarded(getattr(storage, method), nothing, attached, failures))
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    if isinstance(storage, HiCacheFile):
        _remove_half_written(Path(storage.file_path))
        storage.set = _sealing(storage, storage.set, failures)
        storage.get = _opening(storage, storage.get, failures)
        _quiet.failures = failures
        logging.getLogger(HiCacheFile.__module__).addFilter(_quiet)  # once, however often one is attached


def _remove_half_written(folder: Path) -> None:
    """Nobody else does, and no bound of the folder's size counts them."""
    for file in folder.glob(".*.tmp"):
        with suppress(OSError):  # another rank was faster; another user's
            if time.time() - file.stat().st_mtime > HALF_WRITTEN_S:
                file.unlink()


def _checksum(storage: HiCacheFile, key: str, content: Tensor) -> bytes:
    """Of the name too: what lies under another name is not what was asked for."""
    told = zlib.crc32(content.numpy(), zlib.crc32(storage._get_suffixed_key(key).encode()))
    return told.to_bytes(CHECKSUM_BYTES, "little")


def _sealing(storage: HiCacheFile, write: Callable[..., Any], failures: _Failures) -> Callable[..., Any]:
    """`set` of a folder of files that puts a checksum behind the content, and leaves no file that a full disk cut."""
    import torch

    def sealing(key: str, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        content = value.contiguous().view(torch.uint8).reshape(-1)
        seal = torch.frombuffer(bytearray(_checksum(storage, key, content)), dtype=torch.uint8)
        done = write(key, torch.cat([content, seal]), *args, **kwargs)
        if done and _size(storage, key) not in (None, content.nbytes + CHECKSUM_BYTES):  # NumPy may say nothing of it
            if _remove(storage, key):
                failures.say(f"took a part of a file only, which was removed; is the disk full? {storage.file_path}")
            return False
        return done

    return sealing


def _opening(storage: HiCacheFile, read: Callable[..., Any], failures: _Failures) -> Callable[..., Any]:
    """`get` of a folder of files that removes damaged ones: those that are there are never written again."""
    import torch

    def opening(key: str, target_location: Tensor, *args: Any, **kwargs: Any) -> Any:
        sealed = torch.empty(target_location.nbytes + CHECKSUM_BYTES, dtype=torch.uint8)
        found = read(key, sealed, *args, **kwargs)
        content, seal = sealed[:-CHECKSUM_BYTES], sealed[-CHECKSUM_BYTES:]
        if found is not None and seal.numpy().tobytes() == _checksum(storage, key, content):
            target_location.view(torch.uint8).reshape(-1).copy_(content)
            return target_location
        if found is None and _size(storage, key) == sealed.nbytes:
            return None  # no damage: too many open files, or removed and written meanwhile
        if _remove(storage, key):
            failures.say(f"gave a damaged file, which was removed, and its tokens are computed: {_file(storage, key)}")
        return None

    return opening


def _file(storage: HiCacheFile, key: str) -> Path:
    return Path(storage.file_path, f"{storage._get_suffixed_key(key)}.bin")


def _size(storage: HiCacheFile, key: str) -> int | None:
    try:
        return _file(storage, key).stat().st_size
    except OSError:
        return None


def _remove(storage: HiCacheFile, key: str) -> bool:
    """Whether it was there."""
    try:
        _file(storage, key).unlink()
    except OSError:
        return False
    if storage.metadata_cache is not None:
        storage.metadata_cache.remove(storage._get_suffixed_key(key))
    return True


def _guarded(
    ask: Callable[..., Any], nothing: Callable[..., Any], attached: int, failures: _Failures
) -> Callable[..., Any]:
    @wraps(ask)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if _updates != attached:
            failures.say("holds what other weights computed: it is not used any more; restart the server to use it")
            return nothing(*args, **kwargs)
        try:
            return ask(*args, **kwargs)
        except Exception as error:  # of any storage, a file system or somebody's network
            failures.say(f"failed, and its tokens are computed: {ask.__name__}: {type(error).__name__}: {error}")
            return nothing(*args, **kwargs)

    return guarded


class _Quiet(logging.Filter):
    """Of SGLang's file storage, which logs a line for each page that a full disk does not take, or that is gone."""

    failures: _Failures

    def filter(self, record: logging.LogRecord) -> bool:
        told = record.getMessage()
        if not told.startswith("Failed to "):
            return True
        self.failures.say(f"did not take or give a page, whose tokens are computed: {told}")
        return False


_quiet = _Quiet()


class _Failures:
    """Says what is wrong with a storage, not more often than somebody can read."""

    def __init__(self, storage: str) -> None:
        self._storage, self._said_at, self._unsaid = storage, float("-inf"), 0

    def say(self, text: str) -> None:
        now = time.monotonic()
        if now - self._said_at < SAID_EVERY_S:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} more since)" if self._unsaid else ""
        logger.error("the storage %s %s%s", self._storage, text, more)
        self._said_at, self._unsaid = now, 0
