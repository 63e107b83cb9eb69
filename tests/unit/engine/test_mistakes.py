"""What cannot be is answered: nothing to resume, nobody to send weights to."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.engine.frontend import mistakes


@pytest.mark.parametrize(
    ("released", "asked", "resumed"),
    [
        (set(), None, None),
        (set(), ["kv_cache"], None),
        ({"kv_cache"}, None, ["kv_cache"]),
        ({"kv_cache", "weights"}, ["weights", "weights"], ["weights"]),
        ({"weights"}, ["kv_cache", "weights", "unheard of"], ["weights"]),
    ],
)
def test_only_what_was_released_is_resumed(
    released: set[str], asked: list[str] | None, resumed: list[str] | None
) -> None:
    seen: list[list[str]] = []

    def original(updater: Any, message: Any) -> str:
        seen.append(message.tags)
        for tag in message.tags:
            updater.offload_tags.remove(tag)  # as SGLang does, which raises KeyError
        return "SGLang's answer"

    answer = mistakes.resume(original, SimpleNamespace(offload_tags=released), SimpleNamespace(tags=asked))
    assert seen == ([] if resumed is None else [resumed])
    assert type(answer).__name__ == ("ResumeMemoryOccupationReqOutput" if resumed is None else "str")


def test_weights_for_a_group_that_nobody_made_are_not_sent() -> None:
    def original(worker: dict[str, Any], message: str) -> tuple[bool, str]:
        return worker[message]

    there = {"group": (True, "sent")}
    assert mistakes.send_weights(original, there, "group") == (True, "sent")
    done, said = mistakes.send_weights(original, there, "another")
    assert not done
    assert "/init_weights_send_group_for_remote_instance" in said
    assert "another" in said
