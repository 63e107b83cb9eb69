"""Conversations as text: the tokens of every turn are those of the whole text, and earlier turns are cached."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sglang_hybrid.engine import compat
from sglang_hybrid.engine.frontend.tokenization import texts
from tests.engine.prompts import GRID
from tests.engine.support import Client

pytestmark = pytest.mark.engine

TURNS = 4
PARTS = ["the state ", "of a model\n", "\n\n  ", "é漢字🙂 ", "<|im_end|>", "<|im_start|>user\n", "<|im_", "|>", "12"]


def _content(rng: random.Random) -> str:
    return "".join(rng.choices(PARTS, k=rng.choice([3, 150, 600])))


@pytest.mark.parametrize("salt", [{}, pytest.param({"cache_salt": "mine"}, marks=pytest.mark.slow)])
def test_the_tokens_of_a_turn_are_those_of_the_whole_text(
    serve: Callable[..., Client], models: Callable[[str], Path], salt: dict[str, Any]
) -> None:
    """Its answer is that to the same prompt as tokens, computed with the cache and without."""
    client, rng = serve("gdn"), random.Random(str(salt))
    tokenizer = AutoTokenizer.from_pretrained(models("gdn"))
    messages: list[dict[str, str]] = []
    before = 0
    for turn in range(TURNS):
        messages += [{"role": role, "content": _content(rng)} for role in ("user", "assistant", "user")[turn % 2 :]]
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(whole, add_special_tokens=False)
        body = {"model": "m", "messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **salt}
        said = client.post("/v1/chat/completions", body)
        assert said["usage"]["prompt_tokens"] == len(ids)
        assert said["usage"]["prompt_tokens_details"]["cached_tokens"] >= before // GRID * GRID
        answers = [client.generate(ids, extra_key=f"{salt} {turn}")]  # nobody's prefix
        for form in ({"text": whole}, {"input_ids": ids}):
            sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
            again = client.post("/generate", {**form, "sampling_params": sampling, **salt})
            answers.append((again["output_ids"], again["meta_info"]["cached_tokens"]))
            assert again["meta_info"]["prompt_tokens"] == len(ids)
        assert answers[0][0] == answers[1][0] == answers[2][0], turn
        assert said["choices"][0]["message"]["content"] == tokenizer.decode(answers[0][0], skip_special_tokens=True)
        before = len(ids) - 1
        messages.append({"role": "assistant", "content": said["choices"][0]["message"]["content"]})


LONG = "🙂" * 5_700
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4},
    "/v1/responses": {"input": LONG, "max_output_tokens": 4},
}


def test_a_long_chat_is_the_same_on_every_endpoint(serve: Callable[..., Client], models: Callable[[str], Path]) -> None:
    """Long ones are tokenised beside the event loop; the second and third meet what the first left in the cache."""
    client, tokenizer = serve("gdn"), AutoTokenizer.from_pretrained(models("gdn"))
    messages = [{"role": "user", "content": LONG}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    count = len(tokenizer.encode(whole, add_special_tokens=False))
    for path, body in BODIES.items():
        assert len(json.dumps(body)) > texts.LONG
        usage = client.post(path, {"model": str(models("gdn")), "temperature": 0, **body})["usage"]
        if path == "/v1/chat/completions":
            found, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        elif path == "/v1/messages":
            cached = usage.get("cache_read_input_tokens") or 0
            found = usage["input_tokens"] + cached + (usage.get("cache_creation_input_tokens") or 0)
        elif compat.at_least("0.5.21"):
            found, cached = usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
        else:  # 0.5.17 does not say what came from cache
            found, cached = usage["prompt_tokens"], count
        assert found == count, path
        assert cached >= (0 if path == "/v1/chat/completions" else (count - 1) // GRID * GRID), path
        named = {"prompt": "", "request": {"endpoint": path, "body": {"model": "m", **body}, "page_tokens": 64}}
        assert client.post("/v1/tokenize", named)["count"] == count
