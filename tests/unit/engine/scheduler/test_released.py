"""What is asked for while memory is released is answered; SGLang would compute on addresses without memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.engine.scheduler import released

pytestmark = pytest.mark.filterwarnings("ignore::Warning:sglang")


class ReleaseMemoryOccupationReqInput(SimpleNamespace):
    tags: list[str] | None = None


class ResumeMemoryOccupationReqInput(ReleaseMemoryOccupationReqInput):
    pass


def request(rid: str) -> Any:
    return SimpleNamespace(rid=rid, input_ids=[1])


def scheduler(gone: set[str], saver: bool = True, paused: bool = False) -> Any:
    sent: list[Any] = []
    return SimpleNamespace(
        server_args=SimpleNamespace(enable_memory_saver=saver),
        weight_updater=SimpleNamespace(offload_tags=gone),
        ipc_channels=SimpleNamespace(
            send_to_tokenizer=SimpleNamespace(send_output=lambda answer, request: sent.append((answer, request.rid)))
        ),
        _engine_paused=paused,
        sent=sent,
    )


def handled(at: Any, received: list[Any]) -> list[Any]:
    changed = released.refuse(at, received)
    return received if changed is None else changed[0][1]


def test_requests_learn_how_it_ends_and_others_are_handled() -> None:
    at, other = scheduler({"weights"}), SimpleNamespace(rid=None)
    batch = SimpleNamespace(batch=[request("b"), request("c")])
    assert handled(at, [request("a"), other, batch]) == [other]
    assert [rid for _, rid in at.sent] == [answer.rid for answer, _ in at.sent] == ["a", "b", "c"]
    reason = at.sent[0][0].finished_reason
    assert reason["status_code"] == 503
    assert reason["message"].endswith("call /resume_memory_occupation for: weights")


@pytest.mark.parametrize(
    ("gone", "saver", "paused"), [("kv_cache", False, False), ("kv_cache", True, True), ("unheard of", True, False)]
)
def test_they_are_served_where_nothing_is_gone_and_wait_in_a_pause(gone: str, saver: bool, paused: bool) -> None:
    at, asked = scheduler({gone}, saver, paused), [request("a")]
    assert handled(at, asked) == asked
    assert not at.sent


def test_what_is_released_or_back_in_the_same_step_counts() -> None:
    at = scheduler({"weights"})
    back, again = ResumeMemoryOccupationReqInput(tags=["weights"]), ReleaseMemoryOccupationReqInput()
    served, late = request("a"), request("b")
    assert handled(at, [back, served, again, late]) == [back, served, again]
    assert [rid for _, rid in at.sent] == ["b"]


@pytest.mark.parametrize(
    ("gone", "asked", "resumed"),
    [
        (set(), None, None),
        (set(), ["kv_cache"], None),
        ({"kv_cache"}, None, ["kv_cache"]),
        ({"kv_cache", "weights"}, ["weights", "weights"], ["weights"]),
        ({"weights"}, ["kv_cache", "weights", "unheard of"], ["weights"]),
    ],
)
def test_only_what_was_released_is_resumed(gone: set[str], asked: list[str] | None, resumed: list[str] | None) -> None:
    seen: list[list[str]] = []

    def original(updater: Any, message: Any) -> str:
        seen.append(message.tags)
        for tag in message.tags:
            updater.offload_tags.remove(tag)  # as SGLang does, which raises KeyError
        return "SGLang's answer"

    answer = released.resume(original, SimpleNamespace(offload_tags=gone), SimpleNamespace(tags=asked))
    assert seen == ([] if resumed is None else [resumed])
    assert type(answer).__name__ == ("ResumeMemoryOccupationReqOutput" if resumed is None else "str")


@pytest.mark.parametrize(
    ("gone", "asked", "then"),
    [
        (set(), None, None),
        (set(), ["kv_cache"], ["kv_cache"]),
        ({"kv_cache"}, ["weights", "kv_cache"], ["weights"]),
        ({"kv_cache"}, None, ["cuda_graph", "weights"]),
    ],
)
def test_what_is_released_already_is_not_released_again(
    gone: set[str], asked: list[str] | None, then: list[str] | None
) -> None:
    """An untouched message keeps the tags that it has, none included: elastic memory reads them too."""
    message = SimpleNamespace(tags=asked)
    answer = released.release(lambda _, said: said.tags, SimpleNamespace(offload_tags=gone), message)
    assert answer == then


@pytest.mark.parametrize("asked", [None, ["weights"]])
def test_nothing_is_left_to_release(asked: list[str] | None) -> None:
    def original(*_: Any) -> None:
        pytest.fail("SGLang would copy weights whose memory is gone")

    gone = {"kv_cache", "weights", "cuda_graph"}
    answer = released.release(original, SimpleNamespace(offload_tags=gone), SimpleNamespace(tags=asked))
    assert type(answer).__name__ == "ReleaseMemoryOccupationReqOutput"
