"""A byte tokenizer with chat markers: every text round-trips, so a second turn always continues the first's tokens."""

from __future__ import annotations

from pathlib import Path

PAD, TURN_START, TURN_END = "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, TURN_START, TURN_END)
VOCAB_SIZE = 320
"""256 bytes and 3 markers, rounded up so that the embedding splits evenly over tensor-parallel ranks."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def printable_token_ids() -> list[int]:
    """Ids of the tokens that stand for printable ASCII characters, the only ones the demo model ever emits."""
    return [len(SPECIAL_TOKENS) + _byte_symbols().index(chr(code)) for code in range(33, 127)] + [
        len(SPECIAL_TOKENS) + _byte_symbols().index("Ġ")
    ]


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, its configuration and the chat template into `folder`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = [*SPECIAL_TOKENS, *_byte_symbols()]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def _byte_symbols() -> list[str]:
    """The 256 printable stand-ins that byte-level tokenizers use for bytes, in a fixed order."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())
