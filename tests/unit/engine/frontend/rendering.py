"""Chat requests as SGLang renders them, without a server: templates, a tokenizer with merges, and its chat serving."""

from __future__ import annotations

import asyncio
import json
import random
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.frontend import chat
from sglang_hybrid.engine.frontend.segments import documents

TEXT = "the old mill keeps its gate code, and Mira's brother (the baker) asks: which day? 4821!"
WORDS = [*TEXT.split(), "\n\n"]
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"{name} a thing", "parameters": {"type": "object"}}}
    for name in ("open", "shut", "ask")
]
QWEN = (
    "{%- if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}"
    "{% endif %}# Tools\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools><|im_end|>\n"
    "{% endif %}"
    "{% for m in messages %}{% if not (tools and loop.first and m.role == 'system') %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}\n{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPS = (
    "{% for m in messages %}{% if m.role != 'tool' %}[{{ m.role | upper }}] "
    "{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for p in m.content %}{{ p.text | trim }}{% endfor %}{% endif %} [/]\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[ASSISTANT]{% endif %}"
)


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE of real merges, which join spaces, words and line breaks."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    rng = random.Random(1)
    texts = [" ".join(rng.choices(WORDS, k=400)) + QWEN for _ in range(20)]
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False)
    fast.chat_template = template
    return fast


class Serving:
    """SGLang's chat serving, as far as rendering goes: texts are rendered, then encoded.

    `known`: SGLang has the prompt as text of a template of the tokenizer ("template"), of another one ("conversation"),
    or not at all ("tokens").
    """

    supports_inline_system = False

    def __init__(self, template: str, known: str = "template") -> None:
        self.tokenizer_manager = SimpleNamespace(tokenizer=tokenizer(template), context_len=4096)
        self.known = known
        self.other = self.tokenizer_manager.tokenizer

    def process(self, request: Any, is_multimodal: bool) -> SimpleNamespace:
        messages = [message.model_dump() for message in request.messages]
        tools = [tool.model_dump() for tool in request.tools or []]
        used = self.tokenizer_manager.tokenizer
        template = (used if self.known == "template" else self.other).apply_chat_template
        text = template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        ids = (self.other if self.known == "tokens" else used).encode(text, add_special_tokens=False)
        return SimpleNamespace(prompt=text, prompt_ids=ids, image_data=None, video_data=None, audio_data=None)

    def _engine_prompt(self, result: SimpleNamespace, is_multimodal: bool) -> tuple[str, Any]:
        return ("text", result.prompt) if is_multimodal else ("input_ids", result.prompt_ids)

    def create_error_response(self, message: str, **_: Any) -> str:
        return message


def ask(
    serving: Serving, body: dict[str, Any], anthropic: bool = False, is_multimodal: bool = False
) -> tuple[dict[str, Any], list[int]]:
    """The `custom_params` that a request of `body` gets, and its prompt; what it is refused with is raised."""
    from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    kept: list[Any] = []

    def answer(request: Any) -> None:
        result = chat.process(Serving.process, serving, request, is_multimodal)
        kept.append((request.custom_params, result.prompt_ids))

    async def chats(_: Serving, request: Any, __: Any) -> None:
        answer(request)

    async def messages(serving: Any, request: Any, _: Any) -> None:
        answer(serving._convert_to_chat_completion_request(request))

    raw = SimpleNamespace(_body=json.dumps(body).encode())
    if anthropic:
        facade = AnthropicServing(serving)
        validated = AnthropicMessagesRequest.model_validate(documents.as_text(body)[0])
        refused = asyncio.run(chat.anthropic(messages, facade, validated, raw))
    else:
        refused = asyncio.run(chat.openai(chats, serving, ChatCompletionRequest.model_validate(body), raw))
    if refused is not None:
        raise ConfigError(refused if isinstance(refused, str) else json.loads(refused.body)["error"]["message"])
    return kept[0]
