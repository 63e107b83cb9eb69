"""The demo model that sees: Qwen3.5 as it is published, an image encoder in front of gated-delta-rule and attention
layers, with a tokenizer and processors that make tokens of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_hybrid.demo.tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS

IMAGE, VIDEO, START, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
TOKENS = (START, END, IMAGE, VIDEO)
PATCH = 16
"""Pixels along one side of a patch; a token is two by two of them."""

_BYTES = 256
_CONTENT = "{{ message['content'] }}"
_PARTS = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part.type == 'text' %}{{ part.text }}{% elif part.type == 'video' %}"
    f"{START}{VIDEO}{END}{{% else %}}{START}{IMAGE}{END}{{% endif %}}"
    "{% endfor %}{% endif %}"
)


def token(name: str) -> int:
    """The id of one of `TOKENS`: they follow the tokenizer's own."""
    return len(SPECIAL_TOKENS) + _BYTES + TOKENS.index(name)


QWEN3_5: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
}
"""What demo models of Qwen3.5 with random weights share: three layers of the gated delta rule, and an attention."""


def model(common: dict[str, Any]) -> Any:
    """Two layers of encoder, three of the gated delta rule and one of attention, with positions in three axes."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = {
        **common,
        **QWEN3_5,
        "head_dim": 64,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,  # the only one that SGLang reads
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": common["hidden_size"],
        "num_position_embeddings": 256,
        "patch_size": PATCH,
        "deepstack_visual_indexes": [],
    }
    return Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(
            text_config=text,
            vision_config=vision,
            image_token_id=token(IMAGE),
            video_token_id=token(VIDEO),
            vision_start_token_id=token(START),
            vision_end_token_id=token(END),
            tie_word_embeddings=False,
        )
    )


def save_processor(folder: Path) -> None:
    """Give the tokenizer in `folder` the tokens of images and a chat template with them, and write the processors."""
    from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)  # the model's own class has tokens of its own
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS)})
    tokenizer.chat_template = CHAT_TEMPLATE.replace(_CONTENT, _PARTS)
    pixels = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": 2**20}
    sizes: dict[str, Any] = {"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2, "size": pixels}
    Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**sizes),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**sizes),
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)
