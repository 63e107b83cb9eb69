"""Sessions of a server of several data-parallel replicas."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.engine.frontend.requests import keep_session


@pytest.mark.parametrize("groups", [{"dp_size": 4}, {"dp_size": 1, "attn_dp_size": 4}])
def test_all_turns_of_a_session_go_to_one_replica(groups: dict[str, int]) -> None:
    """Only the replica that a turn came to has it in the session's history."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    ranks = [_rank(groups, session_params={"id": session}) for session in "abcdefgh" * 2]
    assert ranks[:8] == ranks[8:]
    assert set(ranks) == {0, 1, 2, 3}
    assert _rank(groups, session_params={"id": "a"}, routed_dp_rank=3 - ranks[0]) == 3 - ranks[0], "the client chooses"
    if "data_parallel_rank" in GenerateReqInput.__dataclass_fields__:  # not in 0.5.17
        assert _rank(groups, session_params={"id": "a"}, data_parallel_rank=3) is None, "by its older name, too"
    assert _rank(groups) is None
    assert _rank({"dp_size": 1}, session_params={"id": "a"}) is None


def _rank(groups: dict[str, int], **fields: Any) -> int | None:
    from sglang.srt.managers.io_struct import GenerateReqInput

    turn = GenerateReqInput(input_ids=[5, 6, 7], sampling_params={}, **fields)
    keep_session(SimpleNamespace(**groups), turn)
    rank: int | None = turn.routed_dp_rank
    return rank
