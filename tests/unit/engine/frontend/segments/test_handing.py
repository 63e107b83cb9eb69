"""What a server does for others over HTTP: it says what it has, computes a segment, and sends its bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from sglang_hybrid.engine import compat
from sglang_hybrid.engine.frontend.segments import parallel
from sglang_hybrid.engine.frontend.segments.files import Files
from sglang_hybrid.engine.frontend.segments.local import name
from sglang_hybrid.engine.frontend.segments.peers import PARCEL, PROBE
from sglang_hybrid.engine.segments import hooks, listing
from tests.unit.engine.segments.exchanging import IDS, Composer, application, exchange, model, static

pytestmark = pytest.mark.skipif(not compat.complete(), reason="segments are refused before the start with this SGLang")

SALTED = {"cache_salt": "a"}


class Manager:
    """SGLang's tokenizer manager in front of a scheduler that computes segments of drawn bytes, or none."""

    def __init__(self, composer: Composer) -> None:
        self.composer, self.computed, self.computes = composer, list[list[int]](), True
        self.requests = list[Any]()
        composer.exchange = exchange(composer)  # type: ignore[attr-defined]
        self.model_config, self.context_len, self.tokenizer = SimpleNamespace(vocab_size=1000), 4096, None
        self.server_args = SimpleNamespace(admin_api_key=None, api_key=None)
        self.rid_to_state: dict[str, Any] = {}

    async def generate_request(self, obj: Any, request: Any) -> AsyncIterator[list[dict[str, Any]]]:
        self.requests.append(request)
        for ids, params in zip(obj.input_ids, obj.sampling_params, strict=True):
            ((start, end),) = params["custom_params"]["segments"]
            self.computed.append(ids[start:end])
            if self.computes and obj.cache_salt is None:
                self.composer.make(ids[start:end], 2)
        yield [{"meta_info": {"cached_tokens_details": {"miss_segment_long": 1}}} for _ in obj.input_ids]

    async def dumper_control(self, message: Any) -> list[Any]:
        scheduler = SimpleNamespace(tree_cache=self.composer)
        return [listing.control(lambda *_: pytest.fail("not SGLang's"), scheduler, message)]


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch, configure: Callable[..., None]) -> Manager:
    configure(segments="on", segment_peers="http://a:1")
    monkeypatch.setattr(hooks, "composer_of", lambda cache: cache)
    monkeypatch.setattr(parallel, "_parallel", None)
    return Manager(static())


def post(manager: Manager, path: str, body: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=application(manager))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post(path, content=json.dumps(body))

    return asyncio.run(ask())


def form(manager: Manager) -> str:
    said: dict[str, str] = post(manager, PROBE, {"names": [], "form": "?"}).json()
    return said["form"]


def parcel(manager: Manager, ids: list[int] = IDS, **tenant: str) -> tuple[dict[str, Any], bytes]:
    answer = post(manager, PARCEL, {"form": form(manager), "segment": ids, **tenant})
    assert answer.status_code == 200, answer.text
    length = int.from_bytes(answer.content[:4], "little")
    head = json.loads(answer.content[4 : 4 + length])
    return head, answer.content[4 + length :]


def test_a_segment_is_computed_once_and_sent_twice(manager: Manager) -> None:
    names = [name(IDS, {}), name(IDS, SALTED)]
    before = post(manager, PROBE, {"names": names, "form": "?"}).json()
    assert (before["held"], before["waiting"], before["pace"]) == ([False, False], 0, None)
    head, data = parcel(manager)
    assert (head["made"], head["tokens"], len(data)) == (True, len(IDS) - 16, head["bytes"])
    assert post(manager, PROBE, {"names": names, "form": "?"}).json()["held"] == [True, False]
    again, same = parcel(manager)
    assert (again["made"], same, manager.computed) == (False, data, [IDS])
    other = static()
    there = exchange(other)
    files = Files(1)
    Path(files.told["paths"][0]).write_bytes(data)
    question = {
        "unpack": IDS,
        "form": form(manager),
        "from": files.told,
        "tokens": head["tokens"],
        "kept": head["kept"],
    }
    assert there.answer(None, {**question, "made": True}) == {}
    (left,), (right,) = manager.composer.index, other.index
    assert manager.composer.read(left) == other.read(right)


def test_what_left_meanwhile_is_computed_again(manager: Manager) -> None:
    parcel(manager)
    manager.composer.index.clear()
    head, _ = parcel(manager)
    assert (head["made"], len(manager.computed)) == (True, 2)


def test_whoever_leaves_can_be_seen_while_it_is_computed(manager: Manager) -> None:
    parcel(manager)
    (request,) = manager.requests
    assert request.url.path == PARCEL, "SGLang aborts what it computes for a connection that is closed"


def test_what_cannot_be_sent_is_said(manager: Manager) -> None:
    manager.computes = False
    answer = post(manager, PARCEL, {"form": form(manager), "segment": IDS})
    assert (answer.status_code, "this segment is not kept: segment_long" in answer.text) == (503, True)


def test_nothing_is_computed_for_a_server_that_differs(manager: Manager) -> None:
    answer = post(manager, PARCEL, {"form": exchange(static(), model(3)).form.hex(), "segment": IDS})
    assert (answer.status_code, manager.computed) == (409, [])
    assert "weights" in answer.text


def test_form_follows_the_weights(manager: Manager) -> None:
    before = form(manager)
    weights = model()
    manager.composer.exchange = made = exchange(manager.composer, weights)  # type: ignore[attr-defined]
    next(iter(weights.parameters())).data += 1
    made.outdated()
    assert form(manager) == made.form.hex() != before
    answer = post(manager, PARCEL, {"form": before, "segment": IDS})
    assert (answer.status_code, manager.computed) == (409, [])


@pytest.mark.parametrize("body", [None, [], {}, {"names": 1}, {"names": [1]}, {"names": ["a"] * 257}])
def test_a_question_that_is_none(manager: Manager, body: Any) -> None:
    answer = post(manager, PROBE, body)
    assert (answer.status_code, "names are those of at most 256 segments" in answer.text) == (400, True)


@pytest.mark.parametrize(
    "body",
    [
        None, [], {"segment": IDS}, {"form": 1, "segment": IDS}, {"form": "f"}, {"form": "f", "segment": []},
        {"form": "f", "segment": [1000]}, {"form": "f", "segment": "text"}, {"form": "f", "segment": IDS, "x": 1},
        {"form": "f", "segment": IDS, "cache_salt": 1}, {"form": "f", "segments": [IDS, IDS], "segment": IDS},
    ],
)  # fmt: skip
def test_a_segment_that_is_none(manager: Manager, body: Any) -> None:
    assert post(manager, PARCEL, body).status_code == 400
    assert manager.computed == []


def test_without_others_there_is_nothing_to_call(manager: Manager, configure: Callable[..., None]) -> None:
    configure(segments="on")
    assert post(manager, PROBE, {"names": []}).status_code in (404, 405)
    assert post(manager, PARCEL, {"form": "f", "segment": IDS}).status_code in (404, 405)
