"""What servers tell and hand each other of their segments, in the scheduler; `frontend.segments.peers` asks.

A server whose prompt has cold segments has other servers compute some of them (segment parallelism, HYPIC, section
4.4). An entry goes over as bytes, so both have the same model, weights and layout of entries: their `form`. Every rank
writes its share into a file that its HTTP process holds, and reads its own from one.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from sglang_hybrid import __version__
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.cache import requests
from sglang_hybrid.engine.launch.fingerprint import NOT_THE_MODEL
from sglang_hybrid.engine.pools.ranks import Group
from sglang_hybrid.engine.segments.parcels import FORM_BYTES, Parcels, name
from sglang_hybrid.engine.segments.weights import digest
from sglang_hybrid.segment.index import COLD, EVICTED
from sglang_hybrid.segment.prompt import Cached, SegmentedPrompt

if TYPE_CHECKING:
    from sglang_hybrid.engine.segments.composer import Composer

QUESTIONS = ("who", "cold", "pack", "unpack")


def memory_name(token: str, rank: int) -> str:
    """What the file is called through which a rank and its HTTP process hand each other one entry."""
    return f"segment-{token}-{rank}"


class Exchange:
    """Of one scheduler, that serves `model` with the other ranks of its `group`."""

    def __init__(self, composer: Composer, model: torch.nn.Module, group: Group | None) -> None:
        self._composer, self._model, self._group = composer, model, group
        self._rank, self._ranks = (0, 1) if group is None else group.place
        self._server = secrets.token_hex(8)
        self._parcels = Parcels(composer.store)
        self._form: bytes | None = None
        self._since = 0

    def outdated(self) -> None:
        """The weights change now: what was made before is not handed out, and what is known of them counts no more."""
        self._form, self._since = None, self._composer.index.next_number

    @property
    def form(self) -> bytes:
        """What two servers have in common between which entries can go: `FORM_BYTES`, the same on every rank."""
        if self._form is None:
            composer = self._composer
            seams, mode, shapes = composer.seams, composer.served.mode, composer.store.shapes
            layer = composer.store.layers[0]
            about = (
                __version__, compat.engine_version(), shapes, layer.end_state.dtype, mode, seams.head, seams.tail,
                composer.store.state_bytes, self._ranks, _settings(getattr(self._model, "config", None)),
            )  # fmt: skip
            weights = digest(self._model)
            all_ranks = [weights] if self._group is None else self._group.gathered(weights)
            found = hashlib.blake2b(repr(about).encode(), digest_size=FORM_BYTES)
            found.update(b"".join(all_ranks))
            self._form = found.digest()
        return self._form

    def answer(self, cache: Any, question: dict[str, Any]) -> dict[str, Any]:
        """The answer to one question; in each, `why` says what cannot be.

        `{"who": None}`: the server, its form, its ranks, and the bytes of an entry at most, for itself and for each
        token. `{"cold": [[start, end], ...], "ids": ids}`: these, and which of a prompt's segments have to be made.
        `{"pack": ids, "form": form, "into": files}`: its entry goes into the files `{"paths": [path of each rank, ...],
        "token": what their names have}`. `{"unpack": ids, "form": form, "from": files, "tokens": n, "kept": n, "made":
        bool}`: an entry of another server becomes ours; it was `made` for a request that comes here. A tenant has
        `extra_key` and `cache_salt`.
        """
        if "pack" in question:
            return self._pack(question)
        if "unpack" in question:
            return self._unpack(question)
        sizes = self._parcels.size(0, self._composer.index.costs.transitions), self._composer.store.token_bytes
        said: dict[str, Any] = {
            "server": self._server, "form": self.form.hex(), "ranks": self._ranks, "sizes": list(sizes)
        }  # fmt: skip
        return said if "who" in question else {**said, "cold": self._cold(cache, question)}

    def _cold(self, cache: Any, question: dict[str, Any]) -> list[int]:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        composer, ids = self._composer, array("q", question["ids"])
        tenant = _tenant(question)
        ranges = tuple((low, high) for low, high in question["cold"])
        prompt = SegmentedPrompt(ids, ranges, composer.seams, composer.identity, requests.namespace(tenant))

        def cached(key: Any) -> Cached:
            found = cache.match_prefix(
                MatchPrefixParams(key=RadixKey(key, tenant.extra_key, cache_salt=tenant.cache_salt))
            )
            return Cached(compat.matched_tokens(found), found.full_kv_hit_length)

        known = ids[:-1]  # the last token is computed whatever is cached
        prompt.compose(prompt.way(known, cached, composer.index))
        start = cached(prompt.keyed(known)).tokens
        return [
            number
            for number, each in enumerate(prompt.segments)
            if each.composed
            and each.interior[0] >= start
            and each.tokens <= composer.served.most
            and composer.index.find(each.key) is None
        ]

    def _pack(self, question: dict[str, Any]) -> dict[str, Any]:
        self._ran()
        entry = self._composer.index.find(self._key(question["pack"], _tenant(question)))
        if entry is None or entry.making:
            return {"why": "it is not there"}
        if entry.number < self._since:
            return {"why": "it was made with other weights"}
        if (why := self._stranger(question)) is not None:
            return {"why": why}
        data = self._parcels.pack(entry, self._head(question["pack"], question))

        def write() -> None:
            with self._file(question["into"], "rb+") as file:
                file.truncate()
                file.write(data.numpy().data)

        if not self._all(write):
            return {"why": "there is no memory to send it from"}
        self._composer.index.counts.handed_out += 1
        self._composer.tell()
        return {"tokens": entry.tokens, "kept": int(entry.transitions.size), "bytes": data.numel()}

    def _unpack(self, question: dict[str, Any]) -> dict[str, Any]:
        composer, tenant = self._composer, _tenant(question)
        index, key = composer.index, self._key(question["unpack"], tenant)
        if index.find(key) is not None:
            return {}
        if (why := self._stranger(question)) is not None:
            return {"why": why}
        tokens, kept = int(question["tokens"]), int(question["kept"])
        here = len(question["unpack"]) - composer.seams.head - composer.seams.tail
        data = bytearray()

        def read() -> None:
            with self._file(question["from"], "rb") as file:
                data.extend(file.read())
            fits = tokens == here and kept <= index.costs.transitions
            if not fits or not self._parcels.fits(data, self._head(question["unpack"], question), tokens, kept):
                raise ValueError(f"not what a server of this form sends: {len(data)}")

        if not self._all(read):
            return {"why": "what came is no entry of this segment"}
        self._ran()
        mark = index.sight(key, composer.now())
        reason = EVICTED if mark.evicted else COLD
        entry = index.admit(key, tokens, mark, composer.now())
        if entry is None:
            composer.tell()
            return {"why": "it is worth less than all that is kept"}
        self._parcels.unpack(torch.frombuffer(data, dtype=torch.uint8), entry, kept)
        self._wait()  # what comes next may run elsewhere on the device
        entry.making, entry.owed = False, reason if question["made"] else ""
        index.settle(entry, kept)
        index.unpin(entry)
        composer.births.made(entry, composer.now(), requests.namespace(tenant), (each.number for each in index))
        index.counts.fetched += 1
        composer.tell()
        return {}

    def _key(self, ids: list[int], tenant: Any) -> bytes:
        return self._composer.identity.key(array("q", ids), requests.namespace(tenant))

    def _head(self, ids: list[int], question: dict[str, Any]) -> bytes:
        return self.form + name(ids, requests.namespace(_tenant(question)))

    def _stranger(self, question: dict[str, Any]) -> str | None:
        form = self.form.hex()
        if question["form"] == form:
            return None
        return (
            f"the servers differ in model, weights, release or settings of segments: {question['form']} is not {form}"
        )

    def _file(self, files: dict[str, Any], mode: str) -> BinaryIO:
        """This rank's file, opened; ValueError for one that is not the question's own file in memory, whoever asks."""
        path, wanted = files["paths"][self._rank], f"/memfd:{memory_name(files['token'], self._rank)}"

        def check(link: str) -> None:
            if not os.path.islink(link) or os.readlink(link).removesuffix(" (deleted)") != wanted:
                raise ValueError(f"a segment goes through a file in memory, that of its question: {path}")

        check(path)
        file: BinaryIO = open(path, mode)  # noqa: SIM115
        try:
            check(f"/proc/self/fd/{file.fileno()}")  # the path may have become another's
        except ValueError:
            file.close()
            raise
        return file

    def _all(self, do: Callable[[], object]) -> bool:
        """Whether every rank could `do` its share."""
        try:
            do()
            done = 1
        except (OSError, ValueError, IndexError):
            done = 0
        return bool(done if self._group is None else self._group.least(done))

    def _ran(self) -> None:
        """Every pass that was launched has run; which transitions of what it made vanished is known."""
        self._wait()
        self._composer.settling.ran()

    def _wait(self) -> None:
        if self._composer.store.buffer.device.type == "cuda":
            torch.cuda.synchronize()


def _tenant(question: dict[str, Any]) -> Any:
    return SimpleNamespace(extra_key=question.get("extra_key"), cache_salt=question.get("cache_salt"))


def _settings(config: Any) -> str:
    """What a model computes by beside its weights, as changed at the start: norms, rotary angles, windows."""

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): kept(each) for key, each in value.items() if key not in NOT_THE_MODEL}
        if isinstance(value, list | tuple):
            return [kept(each) for each in value]
        return value if isinstance(value, str | int | float | None) else str(type(value))

    return json.dumps(kept(config.to_dict()) if hasattr(config, "to_dict") else None, sort_keys=True)
