"""What a request of a pair says beside its own words, and which requests no pair can answer."""

from __future__ import annotations

import secrets
from typing import Any, NamedTuple

import orjson

IN_HEADERS = ("/v1/messages",)
"""SGLang reads the room of these from headers alone, and only where SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES=1; our
launcher sets that for servers of pairs."""

HEADER = "X-Override-Bootstrap-"
TOP_LOGPROBS = 128
"""Of the first token, for which SGLang's metadata has room."""

_FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key")


class Room(NamedTuple):
    """Where the server that decodes finds the one that prefills, and the number that both know the request by.

    A request of several prompts has as many numbers from `room` on.
    """

    host: str
    port: int
    room: int

    @classmethod
    def new(cls, host: str, port: int) -> Room:
        """With a number that no other request has: routers do not know of one another's."""
        return cls(host, port, secrets.randbits(62) + 1)

    def fields(self) -> dict[str, Any]:
        return {"bootstrap_host": self.host, "bootstrap_port": self.port, "bootstrap_room": self.room}

    def headers(self) -> dict[str, str]:
        return {HEADER + name.title(): str(value) for name, value in zip(("host", "port", "room"), self, strict=True)}


def appended(raw: bytes, body: dict[str, Any], more: dict[str, Any]) -> bytes:
    """The JSON object `raw`, which reads as `body`, with `more` behind its fields; the rest stays byte for byte.

    Of two fields with one name, SGLang's readers take the later one.
    """
    return raw.rstrip()[:-1] + (b"," if body else b"") + orjson.dumps(more)[1:]


def refusal(path: str, body: dict[str, Any] | None) -> tuple[int, str] | None:
    """Status and reason where pairs cannot answer this request; None where they can."""
    if body is None:
        return 400, "the body is no JSON object; the router of pairs adds fields to one"
    for name in _FIELDS:
        if body.get(name) is not None:
            return 400, f"the router sets this field itself; leave it out: {name}"
    params = body.get("sampling_params")
    asked = [body, *(params if isinstance(params, list) else [params])]
    for name in ("n", "best_of", "beam_width"):
        for values in asked:
            count = values.get(name) if isinstance(values, dict) else None
            if isinstance(count, int) and count > 1:
                return 501, f"SGLang gives all samples of a prompt one room, so pairs make one; send several: {name}"
    if path == "/v1/completions" and body.get("echo") and body.get("logprobs"):
        return 501, "the server that answers has not seen the prompt, and no logprobs of it; leave out: echo, logprobs"
    for name in ("top_logprobs_num", "top_logprobs", "logprobs"):
        counts = body.get(name)
        for count in counts if isinstance(counts, list) else [counts]:
            if type(count) is int and count > TOP_LOGPROBS:
                return (
                    501,
                    f"a pair hands over at most {TOP_LOGPROBS} log-probabilities of a token; ask for less: {name}",
                )
    starts = body.get("logprob_start_len")
    for start in starts if isinstance(starts, list) else [starts]:
        if path == "/generate" and body.get("return_logprob") and isinstance(start, int) and start >= 0:
            return 501, f"the server that answers has no logprobs of the prompt; leave out: logprob_start_len {start}"
    for name in ("previous_response_id", "background"):
        if path == "/v1/responses" and body.get(name):
            return 501, f"what a response leaves at one server the other of a pair does not have; leave out: {name}"
    return None
