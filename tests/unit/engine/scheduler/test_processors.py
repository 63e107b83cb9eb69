"""A client's logit processor that fails ends his request: not the scheduler, not those beside it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.frontend.validation.processors import require_readable
from sglang_hybrid.engine.scheduler import processors

ROWS, VOCABULARY = 4, 8


class Request(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


def request(number: int) -> Request:
    made = Request(rid=f"r{number}", finished_reason=None, to_finish=None, custom_logit_processor="text")
    made.sampling_params = SimpleNamespace(custom_params=None)
    return made


def guarded(process: Any) -> Any:
    return processors.guard(lambda text: lambda: process, "text")()


def test_rows_that_fail_are_those_of_their_requests() -> None:
    requests = [request(number) for number in range(ROWS)]
    params = [
        {"__req__": req, "add": number} if number != 2 else {"__req__": req} for number, req in enumerate(requests)
    ]
    logits = torch.rand(ROWS, VOCABULARY)

    def process(rows: torch.Tensor, given: list[dict[str, Any]]) -> torch.Tensor:
        for row, each in zip(rows, given, strict=True):
            row += 1000  # in place, before it fails
            row += each["add"] - 1000
        return rows

    found = guarded(process)(logits.clone(), params)
    for number, req in enumerate(requests):
        assert torch.allclose(found[number], logits[number] + (number if number != 2 else 0), atol=1e-3)
        assert (req.to_finish is not None) == (number == 2)
    assert requests[2].to_finish.to_json()["status_code"] == 400
    assert "KeyError" in requests[2].to_finish.message


def test_requests_without_parameters_are_known_by_their_processor() -> None:
    mine, other, done = (request(number) for number in range(3))
    other.custom_logit_processor, done.finished_reason = "another", object()
    for req in (mine, other, done):
        processors.note(None, req)

    def process(rows: torch.Tensor, given: Any) -> torch.Tensor:
        raise RuntimeError("no")

    logits = torch.rand(1, VOCABULARY)
    assert torch.equal(guarded(process)(logits, [None]), logits)
    assert mine.to_finish is not None
    assert other.to_finish is None
    assert done.to_finish is None


@pytest.mark.parametrize("made", [None, 5, torch.zeros(VOCABULARY), torch.zeros(1, VOCABULARY + 1)])
def test_what_is_no_logits_fails(made: Any) -> None:
    req = request(0)
    logits = torch.rand(1, VOCABULARY)
    assert torch.equal(guarded(lambda rows, given: made)(logits, [{"__req__": req}]), logits)
    assert "it returned" in req.to_finish.message


@pytest.mark.parametrize("value", [-torch.inf, torch.inf, torch.nan])
def test_a_row_without_a_token_to_choose_stays(value: float) -> None:
    logits = torch.rand(2, VOCABULARY)

    def process(rows: torch.Tensor, given: Any) -> torch.Tensor:
        rows[0] = value
        rows[1, 1:] = -torch.inf
        return rows

    found = guarded(process)(logits, [{}, {}])
    assert torch.equal(found[0], logits[0])
    assert found[1].argmax() == 0
    assert found[1].isinf().sum() == VOCABULARY - 1


def test_sglang_s_own_are_what_they_were() -> None:
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor, DisallowedTokensLogitsProcessor

    made = processors.guard(lambda text: DisallowedTokensLogitsProcessor, "text")()
    assert isinstance(made, DisallowedTokensLogitsProcessor)
    assert made(torch.zeros(1, VOCABULARY), [{"token_ids": [3]}])[0, 3] == -torch.inf
    require_readable([DisallowedTokensLogitsProcessor.to_str(), None])
    with pytest.raises(ConfigError, match="TypeError"):
        require_readable(CustomLogitProcessor.to_str())  # abstract
