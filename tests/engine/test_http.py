"""One server and its hostile clients: what harms is refused and leaves nothing, and SIGTERM ends the server.

The tests share the server, in the order of this file; the last one ends it.
"""

from __future__ import annotations

import base64
import json
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dill
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sglang_hybrid.demo.server import Server
from tests.engine.bodies import Document, body_of
from tests.engine.refused import ADMINISTRATORS, ENDS, MESSAGES, MISTAKES, cases
from tests.engine.support import PATIENCE_S, Client, eventually
from tests.versions import since

pytestmark = pytest.mark.engine

KEY, MASTER = "the-key-of-clients", "the-key-of-the-administrator"
LIMITS = ("--hybrid-max-body-mb", "0.5", "--hybrid-max-sequences", "64")
PROXY = ("--fastapi-root-path", "/behind/a/proxy")
OPTIONS = ("--enable-custom-logit-processor", "--enable-metrics")
FLAGS = ("--api-key", KEY, "--admin-api-key", MASTER, "--context-length", "2048", *LIMITS, *PROXY, *OPTIONS)
FEW = {"max_new_tokens": 3}
PROMPT = list(range(3, 103))


@pytest.fixture(scope="module")
def server(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(models("gdn"), FLAGS, log=tmp_path_factory.mktemp("http") / "server.log") as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Client:
    return Client(server, KEY)


@pytest.fixture(scope="module")
def first_answer(client: Client) -> list[int]:
    """What the server said before anybody was hostile."""
    return client.generate(PROMPT, 16)[0]


def message(path: str, text: str) -> str:
    """The words of an error in the form of its endpoint."""
    said: dict[str, Any] = json.loads(text)
    inner = said.get("error", said)
    if isinstance(inner, str):  # of a parameter that SGLang 0.5.23 reads by itself
        return inner
    found: str = inner["message"]
    if path.startswith("/v1/messages"):
        assert said["type"] == "error"
    elif path.startswith("/v1/responses"):
        assert said["error"]["code"] == 400
    elif path.startswith("/v1/"):
        assert said["object"] == "error"
        assert said["code"] == 400
    return found


def stream(client: Client, **fields: Any) -> Iterator[dict[str, Any]]:
    """The events of a streamed request; to close the iterator is to hang up."""
    body = json.dumps({"input_ids": [5, 6, 7], "stream": True, **fields}).encode()
    with client.open("/generate", body, timeout=PATIENCE_S) as response:
        for line in response:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


def running(client: Client) -> int:
    """Requests in the scheduler."""
    loads = json.loads(client.answer("/v1/loads", method="GET")[1])["loads"]
    return sum(int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) for load in loads)


@pytest.mark.parametrize("what", cases([*ENDS, *MISTAKES]))
def test_a_request_that_harms_is_refused(client: Client, first_answer: list[int], what: str) -> None:
    path, body = {**ENDS, **MISTAKES}[what]
    status, text = client.answer(path, body)
    assert status == 400, text
    assert message(path, text)


@pytest.mark.parametrize("what", ADMINISTRATORS)
def test_a_mistake_of_the_administrator_is_refused(server: Server, client: Client, what: str) -> None:
    path, body = ADMINISTRATORS[what]
    status, text = Client(server, MASTER).answer(path, body)
    assert status == 400, text
    assert client.generate([5, 6, 7], 2)[0]


STREAMED = [
    what
    for what, (path, body) in {**ENDS, **MISTAKES}.items()
    if isinstance(body, dict) and path in ("/generate", "/v1/completions", "/v1/chat/completions")
]


@pytest.mark.parametrize("what", cases(STREAMED))
def test_a_stream_of_it_is_refused(client: Client, what: str) -> None:
    """OpenAI's endpoints answer 400; SGLang's own begin the stream, and say so in it."""
    path, body = {**ENDS, **MISTAKES}[what]
    status, text = client.answer(path, {**body, "stream": True})
    if path == "/generate" and status == 200:
        events = text.split("\n\n")
        assert json.loads(events[0].removeprefix("data: "))["error"]["code"] == 400
        assert events[1] == "data: [DONE]"
    else:
        assert status == 400, text
        assert message(path, text)


OF_BODIES = ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


@pytest.mark.parametrize("path", OF_BODIES)
@pytest.mark.parametrize("body", [b"{bad", {"model": "m", "a": "b" * 100_000, "stream": {}}, [["b" * 100_000]]])
def test_an_error_tells_of_the_mistake_alone(client: Client, path: str, body: Any) -> None:
    """Not of the server's files, and not of all that the client sent."""
    status, text = client.answer(path, body)
    assert (status, ".py" in text) == (400, False), text[:2_000]
    assert len(text) < 4_000


def test_a_stream_of_ollama_says_what_is_wrong(client: Client) -> None:
    status, text = client.answer("/api/generate", {"model": "m", "prompt": "a", "options": {"top_k": 2**40}})
    assert (status, "top_k" in json.loads(text)["error"]) == (200, True)


def test_what_is_beyond_a_limit_is_refused_with_its_name(client: Client) -> None:
    status, text = client.answer("/generate", b'{"text": "' + b"a" * 500_000 + b'"}')
    assert (status, "--hybrid-max-body-mb" in text) == (413, True)
    status, text = client.answer("/generate", {"input_ids": [[5]] * 65})
    assert (status, "--hybrid-max-sequences" in text) == (400, True)
    assert client.answer("/generate", {"input_ids": [[5]] * 64, "sampling_params": FEW})[0] == 200


@pytest.mark.parametrize(
    "streams", [False, pytest.param(True, marks=since("0.5.21", "reasons of misses in streamed responses"))]
)
def test_responses_are_served_from_cache(client: Client, models: Callable[[str], Path], streams: bool) -> None:
    """SGLang leaves the endpoint out, with an error of the server, where a package of its own is missing.

    Every prompt token was cached or has the reason why not; the first prompt has nothing but reasons.
    """
    text = ("streamed" if streams else "whole") + " words" * 60
    body = {"model": str(models("gdn")), "input": text, "max_output_tokens": 4, "stream": streams}
    cached = []
    for _ in range(2):
        status, answer = client.answer("/v1/responses", body)
        assert status == 200, answer
        cached.append(int(re.findall(r'"cached_tokens":(\d+)', answer)[-1]))
        missed = json.loads(re.findall(r'"miss_tokens":({[^}]*})', answer)[-1])
        assert cached[-1] + sum(missed.values()) == int(re.findall(r'"(?:prompt|input)_tokens":(\d+)', answer)[-1])
    assert cached[0] < 64 <= cached[1]


TOO_LONG = "a" * (2048 * 64 + 1)
LONG: dict[str, dict[str, Any]] = {
    "/generate": {"text": TOO_LONG},
    "/v1/completions": {"model": "m", "prompt": [TOO_LONG]},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": TOO_LONG}]},
    "/v1/messages": {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": TOO_LONG}]},
    "/v1/messages/count_tokens": {"model": "m", "messages": [{"role": "user", "content": TOO_LONG}]},
    "/v1/tokenize": {"prompt": TOO_LONG},
    "/v1/rerank": {"query": TOO_LONG, "documents": ["b"]},
}


@pytest.mark.parametrize("path", LONG)
def test_a_text_that_no_context_holds_is_not_tokenised(client: Client, path: str) -> None:
    status, text = client.answer(path, LONG[path])
    assert (status, "characters does not fit into the context" in text) == (400, True), text


def test_endless_repeats_that_cannot_stall_are_served(client: Client) -> None:
    """The model is made to say `a` for ever."""
    fields = {"max_new_tokens": 12, "logit_bias": {"67": 100}, "stop_regex": "[^b]a+"}
    answer = client.post("/generate", {"input_ids": [5, 6], "sampling_params": fields})
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "[^b]a+"}


def test_labels_that_metrics_do_not_have_end_nothing(client: Client, server: Server) -> None:
    labelled = {"input_ids": PROMPT, "sampling_params": FEW, "custom_labels": {"team": "a", "model_name": "forged"}}
    assert client.answer("/generate", labelled)[0] == 200
    assert len(client.generate(PROMPT, 2)[0]) == 2
    assert "forged" not in client.answer("/metrics", method="GET")[1]


@pytest.mark.parametrize("text", ["abc", "{}", '{"callable": "80"}', json.dumps({"callable": dill.dumps(print).hex()})])
def test_a_processor_that_cannot_be_made_is_refused(client: Client, text: str) -> None:
    status, said = client.answer("/generate", {"input_ids": [5, 6], "custom_logit_processor": text})
    assert (status, "is what to_str() of its class gives" in said) == (400, True), said


def test_a_processor_that_fails_ends_its_own_request(client: Client) -> None:
    """SGLang's own, without what it reads; beside one that has it, in the same batch."""
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    plain, _ = client.generate(PROMPT, 16)
    body = {
        "input_ids": PROMPT,
        "custom_logit_processor": DisallowedTokensLogitsProcessor.to_str(),
        "sampling_params": {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True},
    }
    given: list[dict[str, Any] | None] = [{"token_ids": [plain[0]]}, {"token": 1}, None]

    def ask(params: dict[str, Any] | None) -> tuple[int, str]:
        sampling = body["sampling_params"] | ({} if params is None else {"custom_params": params})  # type: ignore[operator]
        return client.answer("/generate", {**body, "sampling_params": sampling})

    with ThreadPoolExecutor(len(given)) as pool:
        (good, said), *bad = pool.map(ask, given)
    assert good == 200, said
    assert plain[0] not in json.loads(said)["output_ids"]
    for status, said in bad:
        assert (status, "custom_logit_processor failed" in said) == (400, True), said


def test_a_client_has_a_clients_rights(client: Client, server: Server) -> None:
    assert Client(server).answer("/health", method="GET")[0] == 200, "a probe has no key"
    assert Client(server).answer("/generate", {"input_ids": [5]})[0] == 401
    assert Client(server, "clé").answer("/generate", {"input_ids": [5]})[0] == 401
    named = {"prompt": "", "request": {"endpoint": "/generate", "body": {"text": "hi"}, "page_tokens": 1}}
    assert Client(server).answer("/v1/tokenize", named)[0] == 401, "whoever asks for the names of pages has the key"
    for path in ("/flush_cache", "/update_weights_from_tensor", "/load_lora_adapter_from_tensors"):
        assert client.answer(path, {})[0] in (401, 403), path
    status, text = client.answer("/server_info", method="GET")
    assert (status, KEY in text, MASTER in text) == (200, False, False)


@pytest.mark.parametrize("action", ["start", "stop", "dump"])
def test_experts_that_nobody_records_end_no_scheduler(client: Client, server: Server, action: str) -> None:
    status, text = Client(server, MASTER).answer(f"/{action}_expert_distribution_record", method="GET")
    assert (status, "--expert-distribution-recorder-mode" in text) == (400, True)
    assert len(client.generate(PROMPT, 2)[0]) == 2


def test_an_administrators_mistake_ends_no_scheduler(client: Client, server: Server) -> None:
    administrator = Client(server, MASTER)
    assert administrator.answer("/resume_memory_occupation", {})[0] == 200
    assert administrator.answer("/release_memory_occupation", {"tags": ["kv_cache"]})[0] == 200
    assert [administrator.answer("/resume_memory_occupation", {})[0] for _ in range(2)] == [200, 200]
    nobody = {"master_address": "127.0.0.1", "ports": "1", "group_name": "a"}
    status, text = administrator.answer("/send_weights_to_remote_instance", nobody)
    assert (status, "/init_weights_send_group_for_remote_instance" in text) == (400, True)
    for mistake in ({"log_requests_level": 9}, {"log_requests_format": "xml"}, {"log_level": "loud"}):
        status, text = administrator.answer("/configure_logging", {"log_requests": True, **mistake})
        assert (status, next(iter(mistake)) in text) == (400, True), text
    assert len(client.generate(PROMPT, 2)[0]) == 2


def test_weights_that_do_not_fit_leave_those_that_were_served(
    client: Client, server: Server, models: Callable[[str], Path], first_answer: list[int]
) -> None:
    administrator = Client(server, MASTER)
    administrator.answer("/begin_weight_update", {})  # which 0.5.17 does not ask for
    junk = {"serialized_named_tensors": [base64.b64encode(b"no tensors").decode()]}
    status, text = administrator.answer("/update_weights_from_tensor", junk)
    assert (status, "cannot load these tensors" in text) == (400, True), text
    administrator.answer("/end_weight_update", {})
    status, text = administrator.answer("/update_weights_from_disk", {"model_path": str(models("mamba2"))})
    assert (status, f"the weights are those of {models('gdn')} again" in text) == (400, True), text
    group = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "group_name": ""}
    status, text = administrator.answer("/init_weights_update_group", group)
    assert (status, "Group name cannot be empty" in text) == (400, True), text
    assert client.generate(PROMPT, 16)[0] == first_answer


def test_who_is_paused_in_the_middle_can_be_aborted(client: Client, server: Server) -> None:
    administrator = Client(server, MASTER)
    answer = stream(client, sampling_params={"max_new_tokens": 1_200, "ignore_eos": True})
    next(answer)
    for mode in ("in_place", "abort"):
        assert administrator.answer("/pause_generation", {"mode": mode})[0] == 200
    assert list(answer)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert administrator.answer("/continue_generation", {})[0] == 200
    assert len(client.generate(PROMPT, 2)[0]) == 2


def test_who_hangs_up_ends_his_own_request(client: Client) -> None:
    """The client's id is the beginning of another's."""
    assert eventually(lambda: running(client) == 0)
    much = {"max_new_tokens": 1_200, "ignore_eos": True}
    others = stream(client, rid="b1", sampling_params=much)
    next(others)
    mine = stream(client, rid="b", sampling_params=much)
    next(mine)
    mine.close()
    assert eventually(lambda: running(client) <= 1)
    last = list(others)[-1]
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 1_200}


TEXT = {"model": "m", "max_tokens": 2}
RIGHT: dict[str, tuple[int, dict[str, Any]]] = {
    "/generate": (250, {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}}),
    "/v1/completions": (150, {**TEXT, "prompt": "hi"}),
    "/v1/chat/completions": (250, {**TEXT, "messages": MESSAGES}),
    "/v1/messages": (100, {**TEXT, "messages": MESSAGES}),
    "/v1/messages/count_tokens": (40, {"model": "m", "messages": MESSAGES}),
    "/v1/score": (60, {"model": "m", "query": "a", "items": ["b"], "label_token_ids": [5]}),
    "/v1/tokenize": (40, {"model": "m", "prompt": "hi"}),
    "/v1/detokenize": (40, {"model": "m", "tokens": [5]}),
    "/v1/embeddings": (20, {"model": "m", "input": "hi"}),
    "/v1/classify": (10, {"model": "m", "input": "hi"}),
    "/v1/rerank": (20, {"query": "a", "documents": ["b"]}),
    "/v1/decisions": (20, {}),
    "/v1/systemone": (20, {}),
    "/v1/responses": (80, {"input": "a", "max_output_tokens": 2}),
    "/encode": (20, {"text": "a"}),
    "/classify": (10, {"text": "a"}),
    "/api/chat": (60, {"model": "m", "messages": MESSAGES, "options": {"num_predict": 2}}),
    "/api/generate": (60, {"model": "m", "prompt": "a", "options": {"num_predict": 2}}),
    "/api/show": (10, {"model": "m"}),
    "/vertex_generate": (40, {"instances": [{"text": "a"}], "parameters": {"sampling_params": {"max_new_tokens": 2}}}),
    "/invocations": (20, {**TEXT, "messages": MESSAGES}),
    "/parse_function_call": (40, {"text": "a", "tools": [], "tool_call_parser": "qwen25"}),
    "/separate_reasoning": (40, {"text": "a", "reasoning_parser": "qwen3"}),
    "/open_session": (30, {"capacity_of_str_len": 100}),
    "/close_session": (20, {"session_id": "a"}),
    "/flush_cache": (5, {}),
    "/load_lora_adapter_from_tensors": (5, {}),
}
"""Bodies tried at each endpoint that serves clients, and a right one; the last two are not for them."""


@pytest.fixture(scope="module")
def document(client: Client) -> Document:
    found: Document = json.loads(client.answer("/openapi.json", method="GET")[1])
    return found


@pytest.mark.parametrize("path", cases(RIGHT))
def test_no_body_is_an_error_of_the_server(client: Client, document: Document, path: str) -> None:
    """Nearly right bodies after SGLang's own OpenAPI document."""
    tries, right = RIGHT[path]
    content = document["paths"][path]["post"].get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema")

    @settings(
        max_examples=tries,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(body_of(document, schema, right) if schema else st.just(right))
    def attempt(body: Any) -> None:
        status, text = client.answer(path, body)
        assert status < 500, text

    attempt()


def test_the_server_is_as_before_and_ends(client: Client, server: Server, first_answer: list[int]) -> None:
    """Streams of several samples, batches, repeated ids and hang-ups, too; nothing is left, so SIGTERM ends it."""
    for fields in (
        {"sampling_params": {**FEW, "n": 4}},
        {"sampling_params": {**FEW, "n": 2}, "input_ids": [[5], [6], [7]]},
        {"sampling_params": FEW, "input_ids": [[5], [6]], "rid": "batch"},
        {"sampling_params": {**FEW, "n": -1}},
        {"sampling_params": FEW, "input_ids": [[5], [10**6]]},
    ):
        assert list(stream(client, **fields))
    chat = {"model": "m", "messages": MESSAGES, "max_tokens": 3, "n": 3, "stream": True}
    assert client.answer("/v1/chat/completions", chat)[0] == 200
    assert client.answer("/v1/completions", {"model": "m", "prompt": ["a", "b"], "n": 2, "stream": True})[0] == 200
    first = stream(client, rid="one", sampling_params={"max_new_tokens": 1_500, "ignore_eos": True})
    next(first)
    repeated = {"input_ids": [[5], [6]], "rid": ["new", "one"], "sampling_params": FEW}
    status, text = client.answer("/generate", repeated)
    assert (status, "Duplicate request ID" in text) == (400, True)
    first.close()
    several = stream(client, sampling_params={"max_new_tokens": 1_500, "ignore_eos": True, "n": 3})
    next(several)
    several.close()
    assert eventually(lambda: running(client) == 0)
    assert client.generate(PROMPT, 16)[0] == first_answer
    administrator = Client(server, MASTER)
    assert eventually(lambda: administrator.answer("/flush_cache", {})[0] == 200)
    assert client.generate(PROMPT, 16) == (first_answer, 0)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE_S) == 0
    assert re.findall(r"Remaining number of requests (\d+)", server.log.read_text()) == ["0"]
