"""The readers' tokenizer: byte-level BPE with single digits and a mark per role, and their chat template.

`python -m sglang_hybrid.demo.reader.tokens [FILE]` trains it again; it is the committed one, byte for byte, as long as
the language of documents is what it was.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from sglang_hybrid.demo.reader.names import HEADS, TAILS

PAD, SYSTEM, USER, ASSISTANT, TOOL, END, DOCUMENT = (
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|end|>",
    "<|doc|>",
)
SPECIAL_TOKENS = (PAD, SYSTEM, USER, ASSISTANT, TOOL, END, DOCUMENT)
VOCABULARY = 1536

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPLIT = r" ?\p{L}+| ?\p{N}|'\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_FILE = Path(__file__).with_name("tokenizer.json")


def train(texts: Iterable[str]) -> Any:
    """A `tokenizers.Tokenizer` of VOCABULARY pieces; the same texts give the same pieces.

    Names are split into their two parts for it: a whole name that became a piece would be one that no other name
    teaches to copy.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, alphabet])
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    parts = re.compile(f"({'|'.join(HEADS)})({'|'.join(TAILS)})")
    tokenizer.train_from_iterator((parts.sub(r"\1_\2", text) for text in texts), trainer)
    return tokenizer


def text(conversations: int = 2000) -> Iterator[str]:
    """What the committed tokenizer was trained on: generated conversations, of training's names and forms, and every
    clause as it opens a sentence, so that each of its words is a piece in either place."""
    from sglang_hybrid.demo.reader import conversations as drawn
    from sglang_hybrid.demo.reader import forms, relations
    from sglang_hybrid.demo.reader.names import TRAIN

    for seed in range(conversations):
        rng = random.Random(seed)
        shape = drawn.shape_for(rng, 400, 0.5, 0.5, TRAIN, forms.TOKENIZER)
        for message in drawn.draw(rng, shape, 8).messages():
            yield message["content"]
    for relation in relations.RELATIONS:
        for clause in (*relation.said, *(text for wh in relation.asked for text in wh)):
            words = re.sub(r" {.}", "", clause)
            if not words.startswith("{"):
                yield from [words[0].upper() + words[1:]] * (conversations // 40)


@lru_cache(maxsize=1)
def load() -> Any:
    """The committed tokenizer."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(_FILE))


def special_id(token: str) -> int:
    return SPECIAL_TOKENS.index(token)


def save(folder: Path) -> None:
    """Write tokenizer.json, its configuration and the chat template into `folder`, as transformers reads them."""
    (folder / "tokenizer.json").write_bytes(_FILE.read_bytes())
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def main(arguments: list[str]) -> int:
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        print("usage: python -m sglang_hybrid.demo.reader.tokens [FILE]", file=sys.stderr)  # noqa: T201
        return 2
    file = Path(arguments[0]) if arguments else _FILE
    if not file.parent.is_dir():
        print(f"error: the tokenizer could not be written; make the folder first: {file.parent}", file=sys.stderr)  # noqa: T201
        return 1
    try:
        file.write_text(train(text()).to_str(pretty=True), encoding="utf-8")
    except OSError as error:
        print(f"error: the tokenizer could not be written; {error.strerror}: {file}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
