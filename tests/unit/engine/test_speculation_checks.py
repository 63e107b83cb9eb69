"""What is refused of speculation with hybrid models, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.launch import arguments, flags, preflight
from sglang_hybrid.engine.speculation import checks
from tests.engine.configs import LLAMA, QWEN3_NEXT, write

NGRAM = ("--speculative-algorithm", "NGRAM")
EAGLE = ("--speculative-algorithm", "EAGLE")


def check(folder: Path, *more: str, config: object = QWEN3_NEXT) -> None:
    namespace = flags.parse_engine(["--model-path", str(write(folder / "model", config)), "--device", "cuda", *more])
    checks.check(namespace, preflight.inspect_model(namespace).spec)


@pytest.mark.parametrize(
    ("more", "remedy", "value"),
    [
        ((*NGRAM, "--speculative-ngram-max-bfs-breadth", "1"), "use at least 2", "-breadth 1"),
        ((*NGRAM, "--enable-linear-replayssm-spec"), "drop --enable-linear-replayssm-spec", "-algorithm NGRAM"),
        (
            (*EAGLE, "--enable-linear-replayssm-spec", "--mamba-radix-cache-strategy", "no_buffer"),
            "use --mamba-radix-cache-strategy extra_buffer",
            ": no_buffer",
        ),
        (
            (*EAGLE, "--enable-linear-replayssm-spec", "--disable-overlap-schedule"),
            "use --mamba-radix-cache-strategy extra_buffer",
            ": auto",
        ),
        ((*EAGLE, "--enable-streaming-session"), "drop --enable-streaming-session", "-algorithm EAGLE"),
        ((*NGRAM, "--mamba-track-interval", "16"), "use at least 24, or", "-interval 16"),
        ((*EAGLE, "--mamba-track-interval", "4"), "use at least 8, or", "-interval 4"),
        (
            (*EAGLE, "--speculative-num-draft-tokens", "200", "--speculative-eagle-topk", "4"),
            "use at least 400, or",
            "-interval 256",
        ),
        ((*EAGLE, "--speculative-num-steps", "63", "--mamba-track-interval", "64"), "least 128", "-interval 64"),
        (("--speculative-algorithm", "DFLASH", "--mamba-track-interval", "16"), "least 32", "-interval 16"),
    ],
)
def test_wrong_answers_are_refused(tmp_path: Path, more: tuple[str, ...], remedy: str, value: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        check(tmp_path, *more)
    assert str(caught.value).endswith(value)
    check(tmp_path, *more, config=LLAMA)


@pytest.mark.parametrize(
    "more",
    [
        NGRAM,
        EAGLE,
        ("--enable-streaming-session",),
        (*NGRAM, "--mamba-track-interval", "24"),
        (*NGRAM, "--mamba-track-interval", "16", "--disable-overlap-schedule", "--page-size", "16"),
        (*NGRAM, "--mamba-track-interval", "16", "--device", "cpu", "--disable-overlap-schedule"),
        (*NGRAM, "--mamba-track-interval", "16", "--mamba-radix-cache-strategy", "no_buffer"),
        (*NGRAM, "--mamba-track-interval", "16", "--disable-radix-cache"),
        (*EAGLE, "--enable-linear-replayssm-spec"),
        (
            *EAGLE,
            "--enable-linear-replayssm-spec",
            "--mamba-radix-cache-strategy",
            "no_buffer",
            "--disable-radix-cache",
        ),
    ],
)
def test_the_rest_is_not(tmp_path: Path, more: tuple[str, ...]) -> None:
    check(tmp_path, *more)


def test_the_launcher_asks(tmp_path: Path) -> None:
    rest = ["--model-path", str(write(tmp_path / "model", QWEN3_NEXT)), *NGRAM]
    rest += ["--speculative-ngram-max-bfs-breadth", "1"]
    namespace = flags.parse_engine(rest)
    with pytest.raises(ConfigError, match="breadth"):
        arguments.complete(namespace, rest, HybridConfig(), preflight.inspect_model(namespace))
