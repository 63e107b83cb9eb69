"""`/hybrid/segments` without a server: what it takes, what it asks the scheduler, who may call it."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.models import find_model
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.frontend.segments import endpoint
from sglang_hybrid.engine.segments import hooks, listing
from sglang_hybrid.engine.segments.listing import Births
from sglang_hybrid.segment.blocks import Blocks
from sglang_hybrid.segment.geometry import Seams
from sglang_hybrid.segment.index import COLD, EVICTED, Costs, SegmentIndex
from sglang_hybrid.segment.keys import Identity
from sglang_hybrid.segment.slabs import Cut
from tests.unit.engine.frontend.rendering import QWEN, tokenizer
from tests.unit.engine.segments.exchanging import application

pytestmark = pytest.mark.skipif(not compat.complete(), reason="segments are refused before the start with this SGLang")

KEY, MASTER = "the-key-of-clients", "the-key-of-the-administrator"
CONTEXT = 300


class Composer:
    """As much of a scheduler's composer as answers questions; `make` computes the segment of a prompt."""

    def __init__(self) -> None:
        self.index = SegmentIndex(Blocks(6, Cut(400)), Costs(find_model("qwen3-next-80b-a3b"), 1000, 10))
        self.seams, self.identity = Seams(8, 3), Identity("model", 8, 8)
        self.store, self.births, self.time, self.told = SimpleNamespace(total_bytes=24_000), Births(), 5.0, 0
        self.exchange = None

    def now(self) -> float:
        return self.time

    def tell(self) -> None:
        self.told += 1

    def make(self, ids: list[int], namespace: str | None) -> str:
        """Why the tokens of the segment were computed, empty if they were not."""
        key = self.identity.key(array("q", ids), namespace)
        if len(ids) < self.seams.least:
            return "segment_short"
        if self.index.find(key) is not None:
            return ""
        mark = self.index.sight(key, self.time)
        why = EVICTED if mark.evicted else COLD
        entry = self.index.admit(key, len(ids) - 16, mark, self.time)
        if entry is None:
            return "segment_refused"
        entry.making = False
        self.births.made(entry, self.time, namespace, [each.number for each in self.index])
        self.index.unpin(entry)
        return why


class Manager:
    """SGLang's tokenizer manager, in front of one scheduler."""

    def __init__(self, composer: Composer) -> None:
        self.composer, self.tokenizer, self.context_len = composer, tokenizer(QWEN), CONTEXT
        self.model_config = SimpleNamespace(vocab_size=len(self.tokenizer))
        self.scheduler = SimpleNamespace(tree_cache=SimpleNamespace(composer=composer))
        self.asked: list[Any] = []

    async def generate_request(self, obj: Any, _: Any) -> AsyncIterator[list[dict[str, Any]]]:
        self.asked.append(obj)
        answers = []
        names = (obj.extra_key, obj.cache_salt)
        for ids, params in zip(obj.input_ids, obj.sampling_params, strict=True):
            ((start, end),) = params["custom_params"]["segments"]
            assert (start > 0, end) == (True, len(ids) - 1), "something before it, one token behind it"
            why = self.composer.make(ids[start:end], None if names == (None, None) else repr(names))
            details = {"miss_segment_seam": 16, **({f"miss_{why}": 50} if why else {})}
            answers.append({"meta_info": {"cached_tokens_details": details}})
        yield answers

    async def dumper_control(self, message: Any) -> list[Any]:
        return [listing.control(lambda *_: pytest.fail("not SGLang's"), self.scheduler, message)]


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch, configure: Callable[..., None]) -> None:
    configure(segments="on")
    monkeypatch.setattr(hooks, "composer_of", lambda cache: cache.composer)


@pytest.fixture
def manager() -> Manager:
    return Manager(Composer())


@pytest.fixture
def app(manager: Manager) -> FastAPI:
    return application(manager)


@pytest.fixture
def client(app: FastAPI) -> Client:
    return Client(app)


class Client:
    """Calls an application, each time in an event loop that is closed afterwards."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app

    def request(self, method: str, url: str, **more: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.request(method, url, **more)

        return asyncio.run(ask())

    def __getattr__(self, method: str) -> Any:
        return lambda url, **more: self.request(method.upper(), url, **more)


def refusal(answer: Any) -> str:
    """The words of an error, whether or not the process has our hook around endpoints."""
    said = answer.json()
    found: str = said.get("message") or said["detail"]
    return found


TEXTS = ["the old mill keeps its gate code. " * 14, "Mira's brother (the baker) asks: which day? 4821! " * 9]
URL = "/hybrid/segments"


def test_what_is_computed_is_listed_and_dropped(client: Client, manager: Manager) -> None:
    first = client.post(URL, json={"segments": TEXTS}).json()["segments"]
    assert [(each["kept"], each["reason"]) for each in first] == [(True, "segment_cold")] * 2
    again = client.post(URL, json={"segments": [*TEXTS, "short"]}).json()["segments"]
    assert [(each["kept"], each["reason"]) for each in again[:2]] == [(True, None)] * 2
    assert (again[2]["kept"], again[2]["reason"], "bytes" in again[2]) == (False, "segment_short", False)
    manager.composer.time += 3.5
    listed = client.get(URL).json()
    keys = [each["key"] for each in listed["segments"]]
    assert keys == [each["key"] for each in first][::-1], "the newest first"
    assert (listed["count"], listed["memory_bytes"]) == (2, 24_000)
    assert listed["bytes"] == sum(each["bytes"] for each in first)
    assert listed["segments"][0]["tokens"] == first[1]["tokens"]
    assert listed["segments"][0]["age_s"] == 3.5
    assert not any(word in json.dumps(listed) for word in ("mill", "gate", "baker")), "never text"
    assert len(client.get(URL + "?limit=1").json()["segments"]) == 1
    assert client.delete(f"{URL}/{keys[0]}").json() == {"dropped": keys[:1]}
    assert client.delete(f"{URL}/{keys[0]}").status_code == 404
    assert client.delete(URL).json() == {"dropped": keys[1:]}
    assert client.get(URL).json()["count"] == 0
    assert manager.composer.index.counts.dropped == 2
    manager.composer.index.check()


def test_what_is_in_use_stays_until_it_is_not(client: Client, manager: Manager) -> None:
    client.post(URL, json={"segments": TEXTS[:1]})
    (entry,) = manager.composer.index
    manager.composer.index.pin(entry)
    assert client.get(URL).json()["segments"][0]["in_use"] is True
    assert client.delete(URL).json()["dropped"] == [entry.key.hex()]
    held = manager.composer.index.blocks.free
    manager.composer.index.unpin(entry)
    assert manager.composer.index.blocks.free > held
    manager.composer.index.check()


def test_tenants_have_their_own(client: Client, manager: Manager) -> None:
    keys = set()
    for names in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"extra_key": "a"}, {"cache_salt": "a"}):
        (said,) = client.post(URL, json={"segments": TEXTS[:1], **names, "model": "m"}).json()["segments"]
        keys.add(said["key"])
    assert len(keys) == 4
    tenants = [each["tenant"] for each in client.get(URL).json()["segments"]]
    assert None in tenants
    assert len(set(tenants)) == 4
    assert not {"a", "b"} & {str(each) for each in tenants}
    other = Births()
    other.made(next(iter(manager.composer.index)), 0.0, repr((None, "a")), [])
    assert other.of(next(iter(manager.composer.index)))[1] not in tenants, "drawn anew with every start"


def test_token_ids_are_taken_as_they_are_and_texts_as_in_a_chat(client: Client, manager: Manager) -> None:
    ids = list(range(5, 105))
    text, tokens = client.post(URL, json={"segments": [TEXTS[0], ids]}).json()["segments"]
    assert tokens["tokens"] == 100
    (obj,) = manager.asked
    alone = manager.tokenizer.encode(TEXTS[0], add_special_tokens=False)
    start, end = obj.sampling_params[0]["custom_params"]["segments"][0]
    assert text["tokens"] == end - start
    assert len(alone) - 6 <= end - start <= len(alone), "its words, but for the ends that depend on neighbours"
    again = client.post(URL, json={"segments": [ids]})
    assert again.json()["segments"][0]["reason"] is None
    assert manager.asked[0].input_ids[1][:4] != manager.asked[1].input_ids[0][:4], "no cached prefix stands in its way"


def test_births_of_what_is_gone_are_forgotten() -> None:
    births, most = Births(), 0
    for number in range(5_000):
        births.made(SimpleNamespace(number=number), float(number), None, range(number - 9, number + 1))
        most = max(most, len(births._known))
    assert most <= 1_100
    assert births.of(SimpleNamespace(number=4_995)) == (4_995.0, None)


BAD: dict[str, tuple[Any, str]] = {
    "no object": ([], "the body is an object with segments"),
    "nothing": ({}, "the body is an object with segments"),
    "a text": ({"segments": "a"}, "a list of texts and lists of token ids"),
    "none": ({"segments": []}, "segments are 1 to 256 texts or lists of token ids: 0"),
    "too many": ({"segments": ["a"] * 257}, "segments are 1 to 256 texts or lists of token ids: 257"),
    "an empty text": ({"segments": ["a b c", ""]}, "segments.1 is a text with tokens"),
    "special tokens": ({"segments": ["a <|im_end|> b"]}, "none of them a special one"),
    "an empty list": ({"segments": [[]]}, "segments.0 is a text or a list of token ids, not an empty one: []"),
    "halves": ({"segments": [[1.5]]}, "segments.0 is a text or a list of token ids"),
    "truths": ({"segments": [[True, 5]]}, "segments.0 is a text or a list of token ids"),
    "below": ({"segments": [[-1]]}, "segments.0 has token ids of the vocabulary"),
    "beyond": ({"segments": [[10**9]]}, "segments.0 has token ids of the vocabulary"),
    "too long": ({"segments": [[5] * CONTEXT]}, f"segments.0 has at most {CONTEXT - 6} tokens, to fit the context"),
    "a salt": ({"segments": ["a"], "cache_salt": 5}, "cache_salt is a text of at most 1024 characters: 5"),
    "an adapter": ({"segments": ["a"], "lora_path": "x"}, "adapters have no segments: 'lora_path'"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_bodies_are_refused_by_name(client: Client, what: str) -> None:
    body, says = BAD[what]
    answer = client.post(URL, json=body)
    assert answer.status_code == 400
    assert says in refusal(answer)


def test_other_bad_calls(client: Client) -> None:
    assert client.post(URL, content=b"{").status_code == 400
    for limit in ("x", "-1", "10001", "1e3", "²", "9" * 30, ""):
        assert client.get(URL, params={"limit": limit}).status_code == 400, limit
    for key in ("x", "A" * 32, "0" * 31, "0" * 33):
        assert client.delete(f"{URL}/{key}").status_code == 400, key
    assert client.put(URL).status_code == 405


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=10,
)


@given(JSON | st.fixed_dictionaries({"segments": JSON | st.lists(JSON, max_size=3)}, optional={"cache_salt": JSON}))
def test_any_json_is_computed_or_refused(body: Any) -> None:
    answer = Client(application(MANAGER)).post(URL, json=body)
    assert answer.status_code in (200, 400)
    if answer.status_code == 400:
        assert len(refusal(answer)) < 250


MANAGER = Manager(Composer())


@pytest.mark.parametrize(
    "body", [{}, {"list": "x"}, {"find": 5}, {"find": [["a"]]}, {"find": [[2**70]]}, {"drop": 5}, {"drop": [[]]}]
)
def test_no_question_ends_a_scheduler(manager: Manager, body: dict[str, Any]) -> None:
    message = SimpleNamespace(method=listing.METHOD, body=body)
    answer = listing.control(lambda *_: None, manager.scheduler, message)
    assert (answer.success, "no such question" in answer.error) == (False, True)


def test_messages_for_sglang_are_sglangs_and_a_stock_cache_has_no_segments(manager: Manager) -> None:
    assert listing.control(lambda *_: "its own", manager.scheduler, SimpleNamespace(method="get")) == "its own"
    manager.scheduler.tree_cache.composer = None
    answer = listing.control(lambda *_: None, manager.scheduler, SimpleNamespace(method=listing.METHOD, body={}))
    assert (answer.success, answer.error) == (False, "this server keeps no segments")


@pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated")
def test_the_administrator_lists_and_drops(app: FastAPI) -> None:
    from sglang.srt.utils.auth import add_api_key_middleware

    add_api_key_middleware(app, api_key=KEY, admin_api_key=MASTER)
    client = Client(app)

    def status(method: str, key: str, path: str = URL) -> int:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return client.request(method, path, headers=headers, json={} if method == "POST" else None).status_code

    assert [status("POST", key) for key in ("", KEY)] == [401, 400]
    for method, path in (("GET", URL), ("DELETE", URL), ("DELETE", f"{URL}/{'0' * 32}")):
        assert [status(method, key, path) for key in ("", KEY)] == [401, 401]
        assert status(method, MASTER, path) in (200, 404)


def test_a_server_without_segments_has_no_such_path(configure: Callable[..., None]) -> None:
    configure(segments="off")
    other = FastAPI()
    other.state.openai_serving_chat = None
    endpoint.open_routes(other, {"type": "http"})
    assert Client(other).get(URL).status_code == 404


def test_routes_are_added_once_and_to_sglangs_application_only(app: FastAPI) -> None:
    endpoint.open_routes(app, {"type": "http"})
    paths = [getattr(route, "path", "") for route in app.routes]
    assert paths.count(URL) == 3
    other = FastAPI()
    endpoint.open_routes(other, {"type": "http"})
    endpoint.open_routes(app, {"type": "lifespan"})
    assert URL not in [getattr(route, "path", "") for route in other.routes]
