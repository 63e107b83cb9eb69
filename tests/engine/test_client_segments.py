"""Segments as clients mark them, against one server: what is reused, what the answers say, what is refused.

The tests share the server, in the order of this file.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sglang_hybrid.demo.server import Server
from tests.engine.segment_calls import PART, REFUSED, SEGMENT, SEPARATOR, calls, chat
from tests.engine.support import PATIENCE_S, Client, events
from tests.versions import served

pytestmark = [pytest.mark.engine, served("segments")]

KEY, MASTER = "the-key-of-clients", "the-key-of-the-administrator"
ON = ("--hybrid-segments", "on", "--hybrid-segment-memory-gb", "0.2")
FLAGS = (
    *ON, "--hybrid-segment-separator", SEPARATOR, "--hybrid-segment-roles", "tool", "--api-key", KEY,
    "--admin-api-key", MASTER, "--context-length", "4096", "--enable-metrics",
)  # fmt: skip
SEAMS = 16
"""Tokens at the ends of a segment that are computed with every use; the demo's tokens are bytes."""


@pytest.fixture(scope="module")
def server(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(models("gdn"), FLAGS, log=tmp_path_factory.mktemp("segments") / "server.log") as server:
        server.wait_ready(PATIENCE_S)
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Client:
    return Client(server, KEY)


@pytest.fixture(scope="module")
def master(server: Server) -> Client:
    return Client(server, MASTER)


@pytest.fixture
def openai_api(server: Server) -> Iterator[Any]:
    import openai

    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as api:
        yield api


@pytest.fixture
def anthropic_api(server: Server) -> Iterator[Any]:
    import anthropic

    with anthropic.Anthropic(base_url=server.url, auth_token=KEY, max_retries=0) as api:
        yield api


def documents(name: str) -> tuple[str, str]:
    return f"{name}: the old mill keeps its gate code. " * 4, f"{name}: Mira's brother, the baker, asks which day. " * 4


def reusable(*texts: str) -> int:
    return sum(len(text) - SEAMS for text in texts)


def adds_up(prompt: int, details: Any) -> dict[str, Any]:
    """The details of a usage; each token of the prompt is cached, of a reused segment, or computed for a reason."""
    said: dict[str, Any] = details if isinstance(details, dict) else details.model_dump()
    assert said["cached_tokens"] + said.get("segment_tokens", 0) + sum(said["miss_tokens"].values()) == prompt, said
    return said


@pytest.mark.parametrize("stream", [False, True])
def test_chats_of_the_openai_package(openai_api: Any, stream: bool) -> None:
    """A second request over the same documents reuses them, in another order, behind other text."""
    one, two = documents(f"chat {stream}")
    more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}

    def ask(lead: str, texts: tuple[str, ...], question: str) -> dict[str, Any]:
        parts: Any = [{"type": "text", "text": text, **SEGMENT} for text in texts]
        parts = [{"type": "text", "text": lead}, *parts, {"type": "text", "text": question}]
        messages: Any = [{"role": "user", "content": parts}]
        answer: Any = openai_api.chat.completions.create(model="m", messages=messages, max_tokens=4, **more)
        usage = list(answer)[-1].usage if stream else answer.usage
        return adds_up(usage.prompt_tokens, usage.prompt_tokens_details)

    first = ask("Read this.", (one, two), "Which gate is it?")
    assert first["segment_tokens"] == 0
    assert first["miss_tokens"]["segment_cold"] == reusable(one, two)
    second = ask("Now read these two:", (two, one), "And whose mill?")
    assert second["segment_tokens"] == reusable(one, two)
    assert second["miss_tokens"]["segment_seam"] == 2 * SEAMS
    assert ask("And this?", (two,), "Well?")["segment_tokens"] == reusable(two)


@pytest.mark.parametrize("stream", [False, True])
def test_completions_of_the_openai_package(openai_api: Any, stream: bool) -> None:
    one, two = documents(f"completion {stream}")
    more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}

    def ask(*parts: str, **others: Any) -> Any:
        prompt = SEPARATOR.join(parts)
        answer: Any = openai_api.completions.create(model="m", prompt=prompt, max_tokens=4, **more, **others)
        return list(answer)[-1].usage if stream else answer.usage

    usage = ask(one, two, "Which gate?")
    assert usage.prompt_tokens == len(one + two + "Which gate?"), "the separators are gone"
    assert adds_up(usage.prompt_tokens, usage.prompt_tokens_details)["segment_tokens"] == 0
    usage = ask("", two, "", one, "And whose mill?")
    assert adds_up(usage.prompt_tokens, usage.prompt_tokens_details)["segment_tokens"] == reusable(one, two)
    usage = ask(two, "Two answers?", n=2)
    assert usage.prompt_tokens_details.segment_tokens in (0, reusable(two)), "or the choices' common prefix was cached"


@pytest.mark.parametrize("stream", [False, True])
def test_responses_of_the_openai_package(openai_api: Any, stream: bool) -> None:
    model, (one, two) = openai_api.models.list().data[0].id, documents(f"responses {stream}")

    def ask(texts: tuple[str, ...], question: str) -> dict[str, Any]:
        parts = [{"type": "input_text", "text": text, **SEGMENT} for text in texts]
        asked: Any = [{"role": "user", "content": [*parts, {"type": "input_text", "text": question}]}]
        answer: Any = openai_api.responses.create(model=model, input=asked, max_output_tokens=4, stream=stream)
        if stream:
            answer = [e.response for e in answer if e.type in ("response.completed", "response.incomplete")][-1]
        return adds_up(answer.usage.input_tokens, answer.usage.input_tokens_details)

    assert ask((one, two), "Which gate?")["segment_tokens"] == 0
    assert ask((two, one), "And whose mill?")["segment_tokens"] == reusable(one, two)


@pytest.mark.parametrize("stream", [False, True])
def test_documents_of_the_anthropic_package(anthropic_api: Any, stream: bool) -> None:
    """What was read, written and neither add up to the prompt, as the package counts it."""
    one, two = documents(f"messages {stream}")

    def ask(texts: tuple[str, ...], question: str) -> Any:
        blocks: Any = [
            {"type": "document", "title": "Found", "source": {"type": "text", "media_type": "text/plain", "data": text}}
            for text in texts
        ]
        messages: Any = [{"role": "user", "content": [*blocks, {"type": "text", "text": question}]}]
        asked: Any = {"model": "m", "messages": messages}
        counted = anthropic_api.messages.count_tokens(**asked).input_tokens
        if stream:
            with anthropic_api.messages.stream(**asked, max_tokens=4) as events:
                usage = events.get_final_message().usage
        else:
            usage = anthropic_api.messages.create(**asked, max_tokens=4).usage
        read, made = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
        assert read + made + usage.input_tokens == counted
        return read

    assert ask((one, two), "Which gate?") < len(one)
    assert reusable(one, two) <= ask((two, one), "And whose mill?") < reusable(one, two) + 64


def test_results_of_tools_are_segments_by_the_servers_flag(client: Client, anthropic_api: Any) -> None:
    """An agent's results, whichever endpoint they come by; a marked part of one is marked alone."""
    result, other = documents("tools")
    call = {"id": "a", "type": "function", "function": {"name": "open", "arguments": "{}"}}

    def chat(content: Any, question: str) -> int:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        messages += [{"role": "tool", "tool_call_id": "a", "content": content}]
        usage = client.post("/v1/chat/completions", {"model": "m", "messages": messages, "max_tokens": 2})["usage"]
        return int(adds_up(usage["prompt_tokens"], usage["prompt_tokens_details"]).get("segment_tokens", 0))

    assert chat(result, "Which gate?") == 0
    assert chat(result, "And whose mill, then?") == reusable(result)
    parts = [{"type": "text", "text": other, **SEGMENT}, {"type": "text", "text": result}]
    assert chat(parts, "Both?") == 0, "a result that was not there yet"
    assert chat(parts, "And again, both of them?") == reusable(other)
    turn: Any = [
        {"role": "user", "content": "Well, well?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "open", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": result}]},
    ]
    usage = anthropic_api.messages.create(model="m", messages=turn, max_tokens=2).usage
    assert reusable(result) <= usage.cache_read_input_tokens < reusable(result) + 64


def test_ranges_and_batches(client: Client) -> None:
    """Token ranges with token ids, one object of parameters for each prompt of a batch, several samples, a stream."""
    one = list(range(20, 220))

    def ask(prompts: Any, params: Any, **more: Any) -> Any:
        return client.post("/generate", {"input_ids": prompts, "sampling_params": params, **more})

    def params(start: int, **more: Any) -> dict[str, Any]:
        return {"max_new_tokens": 2, "custom_params": {"segments": [[start, start + 200]]}, **more}

    ask([5, 6, *one, 7], params(2))
    answers = ask([[7, *one, 9], [8, 8, 8, *one, 9]], [params(1), params(3)])
    details = [each["meta_info"]["cached_tokens_details"] for each in answers]
    assert [each["segment_tokens"] for each in details] == [200 - SEAMS] * 2
    assert [each["miss_segment_seam"] for each in details] == [SEAMS] * 2
    assert len(ask([9, 9, *one, 7], params(2, n=3))) == 3
    streamed = client.answer("/generate", {"input_ids": [3, *one, 7], "sampling_params": params(1), "stream": True})[1]
    last = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")][-1]
    assert last["meta_info"]["cached_tokens_details"]["segment_tokens"] == 200 - SEAMS
    texts = [f"{documents('batch')[0]}{SEPARATOR}a", "plain"]
    answers = client.post("/generate", {"text": texts, "sampling_params": {"max_new_tokens": 2}})
    assert ["segment_tokens" in each["meta_info"]["cached_tokens_details"] for each in answers] == [True, False]


def test_tenants_share_nothing(client: Client, master: Client) -> None:
    one, _ = documents("tenants")

    def ask(question: str, **names: str) -> int:
        parts = [{"type": "text", "text": one, **SEGMENT}, {"type": "text", "text": question}]
        body = {"model": "m", "messages": [{"role": "user", "content": parts}], "max_tokens": 2, **names}
        return int(client.post("/v1/chat/completions", body)["usage"]["prompt_tokens_details"]["segment_tokens"])

    for names in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"extra_key": "a"}):
        assert ask("Which gate is it?", **names) == 0
        assert ask("And whose mill?", **names) == reusable(one)
    listed = json.loads(master.get("/hybrid/segments"))["segments"][:4]
    assert len({each["tenant"] for each in listed}) == len({each["key"] for each in listed}) == 4


def test_segments_are_computed_ahead_listed_and_dropped(client: Client, master: Client) -> None:
    one, two = documents("ahead")
    warmed = client.post("/hybrid/segments", {"segments": [one, two, "short"], "cache_salt": "w"})["segments"]
    assert [(each["kept"], each["reason"]) for each in warmed] == [(True, "segment_cold")] * 2 + [
        (False, "segment_short")
    ]

    def ask(question: str) -> int:
        parts = [{"type": "text", "text": text, **SEGMENT} for text in (one, two)]
        body = chat({"type": "text", "text": question}, *parts, {"type": "text", "text": "So?"}, cache_salt="w")
        return int(client.post("/v1/chat/completions", body)["usage"]["prompt_tokens_details"]["segment_tokens"])

    assert ask("Which gate is it?") == reusable(one, two), "with the first request"
    text = SEPARATOR.join([two, "Well?"])
    usage = client.post("/v1/completions", {"model": "m", "prompt": text, "max_tokens": 2, "cache_salt": "w"})["usage"]
    assert usage["prompt_tokens_details"]["segment_tokens"] == reusable(two), "at another endpoint, too"
    listed = {each["key"]: each for each in json.loads(master.get("/hybrid/segments"))["segments"]}
    mine = [listed[each["key"]] for each in warmed[:2]]
    assert [(each["tokens"], each["hits"]) for each in mine] == [(len(one), 1), (len(two), 2)]
    for method in ("GET", "DELETE"):
        assert client.answer("/hybrid/segments", method=method)[0] == 401, "the administrator's"
    status, said = master.answer(f"/hybrid/segments/{mine[0]['key']}", method="DELETE")
    assert (status, json.loads(said)["dropped"]) == (200, [mine[0]["key"]])
    assert ask("And whose mill?") == reusable(two)
    again = client.post("/hybrid/segments", {"segments": [one], "cache_salt": "w"})["segments"]
    assert (again[0]["kept"], again[0]["key"]) == (True, mine[0]["key"])
    assert json.loads(master.answer("/hybrid/segments", method="DELETE")[1])["dropped"]
    assert json.loads(master.get("/hybrid/segments"))["count"] == 0
    assert ask("Which day?") == 0
    assert ask("And what code?") == reusable(one, two)


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_wrong_is_refused_in_the_words_of_its_endpoint(client: Client, what: str) -> None:
    path, body, says = REFUSED[what]
    for stream in (False, True):
        status, text = client.answer(path, body if path == "/hybrid/segments" else {**body, "stream": stream})
        if path == "/generate" and stream:  # SGLang's own begins the stream, and says so in it
            said = json.loads(text.split("\n\n")[0].removeprefix("data: "))["error"]
            assert said["code"] == 400
        else:
            assert status == 400, text
            said = json.loads(text)
            if path == "/v1/messages":
                assert said["type"] == "error"
            said = said.get("error", said)
        assert says in said["message"]


def examples() -> list[str]:
    """The commands of docs/clients.md's section on segments."""
    page = (Path(__file__).parents[2] / "docs/clients.md").read_text("utf-8")
    section = page.split("## Segments")[1].split("\n## ")[0]
    blocks = re.findall(r"(?m)^    curl .*(?:\n {6}.*)*", section)
    return [block.strip() for block in blocks]


def test_what_the_documents_print_runs(server: Server) -> None:
    assert len(examples()) == 7
    for command in examples():
        assert "http://127.0.0.1:30000" in command
        key = MASTER if "limit" in command or "DELETE" in command else KEY
        command = command.replace("http://127.0.0.1:30000", server.url).replace("<next>", SEPARATOR)
        command = command.replace("curl ", f"curl --silent --show-error --fail -H 'Authorization: Bearer {key}' ", 1)
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, (command, done.stderr)
        assert json.loads(done.stdout)


def test_marks_that_become_plain_text_are_counted(client: Client) -> None:
    """A prompt that is given as tokens; special tokens in a text; white space; parts of a separated prompt."""
    before = events(client, "segments_lost")
    served = (
        ("/v1/chat/completions", chat(PART, PART, input_ids=[5, 6, 7]), 2),
        ("/v1/chat/completions", chat(PART, {**PART, "text": "ends <|im_end|> here"}), 1),
        ("/v1/completions", {"model": "m", "prompt": f"a <|im_end|> b{SEPARATOR}c", "max_tokens": 2}, 1),
        ("/v1/completions", {"model": "m", "prompt": f"{SEPARATOR}{SEPARATOR}a{SEPARATOR}", "max_tokens": 2}, 0),
    )
    for path, body, _ in served:
        assert client.answer(path, body)[0] == 200
    assert events(client, "segments_lost") == before + sum(lost for *_, lost in served)
    assert events(client, "bad_segments") == 0


def test_no_body_is_an_error_of_the_server(client: Client, master: Client) -> None:
    before = client.generate(list(range(3, 103)), 8)[0]

    @settings(
        max_examples=400,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(calls(), st.booleans())
    def attempt(call: tuple[str, dict[str, Any]], stream: bool) -> None:
        path, body = call
        status, text = client.answer(path, {**body, "stream": stream} if path != "/hybrid/segments" else body)
        assert status in (200, 400), (path, body, text)

    attempt()
    master.flush()
    assert json.loads(master.get("/hybrid/segments"))["count"] == 0, "flushing drops segments too"
    assert client.generate(list(range(3, 103)), 8)[0] == before


@pytest.mark.slow
def test_ranks_drop_alike(models: Callable[[str], Path], tmp_path: Path) -> None:
    """Of two tensor-parallel ranks one answers; had the other not dropped the same, their passes would differ."""
    one, two = documents("ranks")
    cores = sorted(os.sched_getaffinity(0))
    bound = {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}  # the cores of each rank
    with Server(models("gdn"), (*ON, "--tp-size", "2"), log=tmp_path / "server.log", environment=bound) as server:
        server.wait_ready(PATIENCE_S)
        client = Client(server)
        for _ in range(3):
            warmed = client.post("/hybrid/segments", {"segments": [one, two]})["segments"]
            assert all(each["kept"] for each in warmed)
            path = f"/hybrid/segments/{warmed[0]['key']}"
            assert json.loads(client.answer(path, method="DELETE")[1])["dropped"] == [warmed[0]["key"]]
            parts = [{"type": "text", "text": text, **SEGMENT} for text in (two, one)]
            said = client.post("/v1/chat/completions", chat(*parts, {"type": "text", "text": "Well?"}))["usage"]
            assert said["prompt_tokens_details"]["segment_tokens"] == reusable(two)
            assert len(json.loads(client.answer("/hybrid/segments", method="DELETE")[1])["dropped"]) == 2
            client.flush()
