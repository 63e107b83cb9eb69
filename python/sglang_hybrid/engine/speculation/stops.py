"""Ends an answer where it would end without speculation, when a run of several tokens holds several ends.

SGLang looks through a run for the stop strings in the order in which they were asked for, for patterns next, and for
end-of-text last. The first it finds ends the answer, wherever it lies: text behind an end-of-text is sent, or behind
another stop string. 0.5.17 looks at the length before all of them: what a last run holds behind an end is sent.
"""

from __future__ import annotations

from typing import Any


def first_end(original: Any, req: Any, new_accepted_len: int = 1) -> Any:
    """AROUND `Req.update_finish_state`: tokens of the run count one after the other, as if each was a step."""
    wanted = req.sampling_params
    several = bool(wanted.stop_strs or wanted.stop_regex_strs) or len(req.output_ids) >= wanted.max_new_tokens
    if new_accepted_len < 2 or not several or req.to_finish or req.finished():
        return original(req, new_accepted_len)
    whole, grammar = req.output_ids, req.grammar
    try:
        for hidden in range(new_accepted_len - 1, 0, -1):
            seen = len(whole) - hidden
            req.output_ids, req.grammar = whole[:seen], None  # a grammar has seen all of the run, and ends with it
            original(req, 1)
            if req.finished():
                whole[:seen] = req.output_ids  # a token that is none was put right
                if req.finished_len is None:
                    req.finished_len = seen
                return None
    finally:
        req.output_ids, req.grammar = whole, grammar
    return original(req, 1)
