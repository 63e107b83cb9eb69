"""Pictures, chats with them, and the transformers reference that judges what a server says of them."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = 16


def png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def blocks(seed: int, width: int = 128, height: int = 128) -> bytes:
    """A picture of squares in random colours, as a PNG."""
    colours = np.random.default_rng(seed).integers(0, 256, (height // BLOCK, width // BLOCK, 3), dtype=np.uint8)
    return png(colours.repeat(BLOCK, 0).repeat(BLOCK, 1))


def plain(width: int, height: int) -> bytes:
    """A picture of one colour."""
    return png(np.full((height, width, 3), (200, 30, 90), dtype=np.uint8))


def url(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode()


def image(picture: bytes, **mark: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(picture)}, **mark}


def text(words: str, **mark: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **mark}


def said(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def chat(messages: list[dict[str, Any]], tokens: int = 12, **fields: Any) -> dict[str, Any]:
    """The body of a greedy chat request."""
    sampling = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    return {"model": "m", "messages": messages, **sampling, **fields}


class Viewer:
    """The same weights in transformers, float32."""

    tie = 2e-4

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoProcessor, Qwen3_5ForConditionalGeneration

        torch.set_num_threads(1)
        self.torch = torch
        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()

    def chances(self, messages: list[dict[str, Any]], answer: str) -> tuple[Any, list[int]]:
        """Log-probabilities of all tokens at each token of `answer`, and those tokens."""
        pictures, plainly = _taken_apart(messages)
        tokenizer = self.processor.tokenizer
        prompt = tokenizer.apply_chat_template(plainly, tokenize=False, add_generation_prompt=True)
        given = dict(self.processor(text=[prompt], images=pictures or None, return_tensors="pt"))
        output = tokenizer(answer, return_tensors="pt")["input_ids"]
        length = given["input_ids"].shape[1]
        given["input_ids"] = self.torch.cat([given["input_ids"], output], 1)
        given["attention_mask"] = self.torch.ones_like(given["input_ids"])
        if "mm_token_type_ids" in given:
            given["mm_token_type_ids"] = self.torch.cat([given["mm_token_type_ids"], self.torch.zeros_like(output)], 1)
        with self.torch.no_grad():
            logits = self.model(**given).logits[0, length - 1 : -1].float()
        return self.torch.log_softmax(logits, -1), output[0].tolist()

    def assert_greedy(self, messages: list[dict[str, Any]], answer: str) -> None:
        """Each token is the most likely one given those before it, up to a tie."""
        chances, output = self.chances(messages, answer)
        behind = chances.max(-1).values - chances.gather(1, self.torch.tensor(output)[:, None])[:, 0]
        assert behind.max().item() <= self.tie, f"a token of {answer!r} is {behind.max().item():.1e} below the best"


def _taken_apart(messages: list[dict[str, Any]]) -> tuple[list[Any], list[dict[str, Any]]]:
    from PIL import Image

    pictures, plainly = [], []
    for message in messages:
        parts = message["content"]
        if not isinstance(parts, str):
            for part in parts:
                if part["type"] == "image_url":
                    content = part["image_url"]["url"].partition(",")[2]
                    pictures.append(Image.open(BytesIO(base64.b64decode(content))))
            parts = [{"type": "image"} if part["type"] == "image_url" else part for part in parts]
        plainly.append({**message, "content": parts})
    return pictures, plainly
