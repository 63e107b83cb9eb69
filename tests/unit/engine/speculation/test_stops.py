"""An answer ends where it would end if tokens came one by one, however they are cut into runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from sglang_hybrid.engine.speculation.stops import first_end

END = 9
LETTERS = "abcdefgh"
WANTED = st.fixed_dictionaries(
    {
        "stop": st.lists(st.text("abcd", min_size=1, max_size=3), max_size=3),
        "stop_regex": st.lists(st.sampled_from(["[ab]c", "dd+", "e"]), max_size=2),
        "stop_token_ids": st.lists(st.integers(4, 8), max_size=2),
        "max_new_tokens": st.integers(1, 14),
        "ignore_eos": st.booleans(),
    }
)


class Letters:
    """Tokens 0 to 7 are letters, 9 ends a text."""

    eos_token_id = END
    additional_stop_token_ids = None

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    def decode(self, ids: Any, *_: Any, **__: Any) -> str:
        return "".join(LETTERS[token] if token < 8 else "" for token in ids)


def request(wanted: dict[str, Any]) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(**{**wanted, "stop": wanted["stop"] or None, "stop_regex": wanted["stop_regex"] or None})
    params.normalize(Letters())
    req = Req("r", "a", [0], params, vocab_size=10)
    req.tokenizer = Letters()
    return req


def answer(wanted: dict[str, Any], runs: list[list[int]], grammar_ends: bool = False) -> tuple[list[int], Any]:
    """What is sent of an answer that comes in `runs`, and why it ended; a grammar ends with the last of them."""
    req = request(wanted)
    if grammar_ends:
        req.grammar = SimpleNamespace(is_terminated=lambda: True)
    for run in runs:
        req.output_ids.extend(run)
        first_end(type(req).update_finish_state, req, len(run))
        if req.finished():
            break
    ended = req.finished_reason.to_json() if req.finished() else None
    return list(req.output_ids)[: req.finished_len], ended


@given(tokens=st.lists(st.sampled_from([*range(8), END]), min_size=1, max_size=14), wanted=WANTED, data=st.data())
def test_runs_make_no_difference(tokens: list[int], wanted: dict[str, Any], data: st.DataObject) -> None:
    runs, rest = [], tokens
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        runs.append(rest[:count])
        rest = rest[count:]
    assert answer(wanted, runs) == answer(wanted, [[token] for token in tokens])


WORDS = {"stop": ["b", "a"], "stop_regex": [], "stop_token_ids": [], "max_new_tokens": 14, "ignore_eos": False}


def test_the_first_of_two_stop_strings_ends_it() -> None:
    assert answer(WORDS, [[2, 0, 1, 3]]) == ([2, 0], {"type": "stop", "matched": "a"})


def test_nothing_is_said_behind_the_end_of_text() -> None:
    assert answer(WORDS, [[2, END, 1, 3]]) == ([2, END], {"type": "stop", "matched": END})


def test_a_grammar_ends_with_the_run() -> None:
    assert answer({**WORDS, "stop": ["h"]}, [[2, 3, 4]], grammar_ends=True) == (
        [2, 3, 4],
        {"type": "stop", "matched": 4},
    )


@example(length=2)
@given(length=st.integers(2, 5))
def test_an_abort_is_not_put_off(length: int) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    req = request(WORDS)
    req.to_finish = FINISH_ABORT()
    req.output_ids.extend([2] * length)
    first_end(type(req).update_finish_state, req, length)
    assert isinstance(req.finished_reason, FINISH_ABORT)
    assert req.finished_len is None
