"""The embedded hybrid models: real architectures at toy size. Two of them are trained and read (`demo/reader`); the
others are built on the spot with deterministic random weights.

`python -m sglang_hybrid.demo.model FOLDER [--preset NAME] [--weights FILE]` writes config, tokenizer, chat template and
safetensors; weights trained elsewhere for the same configuration replace those of the preset.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.demo import speculation, vision
from sglang_hybrid.demo.reader import weights as reader_weights
from sglang_hybrid.demo.tokenizer import SPECIAL_TOKENS, TURN_END, VOCAB_SIZE, printable_token_ids, save_tokenizer

FORMAT = 3
"""Raised whenever the same preset would give other weights, so that a stale folder is rebuilt."""

SEED = 20261120


def build(folder: Path, preset: str = "gdn", weights: Path | None = None) -> Path:
    """Write the model `preset` into `folder` unless it is already there, and return `folder`.

    `weights`: a safetensors file with the same tensor names and shapes. Raises ConfigError for an unknown preset,
    a missing or damaged weight file, or a non-empty folder that this function did not write.
    """
    if preset not in (*READERS, *PRESETS):
        raise ConfigError(f"unknown demo model, choose one of {', '.join((*READERS, *PRESETS))}: {preset!r}")
    if weights is not None and not weights.is_file():
        raise ConfigError(f"no such weight file: {weights}")
    stamp: dict[str, Any] = {"format": FORMAT, "preset": preset, "seed": SEED}
    stamp["weights"] = str(weights) if weights else None
    if preset in READERS and weights is None:
        card = reader_weights.card(preset)
        stamp |= {"weights": card["sha256"], "head": card.get("drafting", {}).get("sha256")}
    stamp_file = folder / "sglang_hybrid_demo.json"
    if _is_built(stamp_file, stamp):
        return folder
    if folder.exists() and any(folder.iterdir()) and not stamp_file.is_file():
        raise ConfigError(f"the folder is not empty and was not written by this builder; choose another: {folder}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as scratch:  # two builds may run at once
        partial = Path(scratch, folder.name)
        partial.mkdir()
        _write(partial, preset, weights)
        (partial / stamp_file.name).write_text(json.dumps(stamp))
        try:
            if not _is_built(stamp_file, stamp):
                shutil.rmtree(folder, ignore_errors=True)
                partial.rename(folder)  # a build that was interrupted never looks complete
        except OSError:
            if not _is_built(stamp_file, stamp):  # by the other one, a moment ago
                raise
    return folder


def _is_built(stamp_file: Path, stamp: dict[str, Any]) -> bool:
    return stamp_file.is_file() and json.loads(stamp_file.read_text()) == stamp


def _write(folder: Path, preset: str, weights: Path | None) -> None:
    if preset in READERS:
        reader_weights.build(folder, preset, weights)
        return
    from sglang_hybrid.engine import cpu

    cpu.install()  # transformers imports torchvision, whose published wheel does not load beside a CPU torch
    from transformers.utils import logging

    logging.set_verbosity_error()  # no advice on kernels: the model is built here, not run
    logging.disable_progress_bar()
    model = _random(preset)
    if preset == speculation.DRAFT:
        speculation.imitate(model, _random(speculation.MTP))
    if weights is not None:
        from safetensors.torch import load_file

        model.load_state_dict(load_file(weights), strict=True)
    model.float().save_pretrained(folder)
    save_tokenizer(folder)
    if preset in (VISION, speculation.VISION_MTP):
        vision.save_processor(folder)
    if preset in HEADS:
        speculation.add_head(folder, model)


def _random(preset: str) -> Any:
    import torch

    torch.manual_seed(SEED)
    model = PRESETS[preset]()
    _initialise(model)
    if preset in HEADS:
        speculation.calm(model)
    return model


def _initialise(model: Any) -> None:
    """Random weights that make a good test subject: slow decay (long memory) and only printable greedy output."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.copy_(torch.linspace(-4, -1, weight.numel()).view_as(weight))
            elif name.endswith("dt_bias"):
                weight.copy_(torch.linspace(-2, 0, weight.numel()))
            elif name.endswith(".D"):
                weight.fill_(0.5)
            elif weight.dim() >= 2:
                weight.copy_(torch.randn_like(weight) * (0.15 if "conv1d" not in name else 0.4))
        head = model.lm_head.weight
        spoken = torch.zeros(head.shape[0], 1)
        spoken[printable_token_ids()] = 1
        head.mul_(spoken)  # a silent token has logit 0, and some spoken one is always above it


def _gdn(hidden: int = 128, blocks: int = 1, head: int = 32) -> Any:
    """Qwen3-Next: three gated-delta-rule layers to one attention layer, with a small mixture of experts."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
    from transformers.models.qwen3_next import modeling_qwen3_next as modelling

    modelling.FusedRMSNormGated = None  # beside flash-linear-attention it would be made on a GPU, alone of all weights
    heads = hidden // head
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **_common(hidden),
            num_hidden_layers=4 * blocks,
            layer_types=(["linear_attention"] * 3 + ["full_attention"]) * blocks,
            full_attention_interval=4,  # what SGLang reads
            num_attention_heads=heads,
            num_key_value_heads=max(heads // 2, 1),
            head_dim=head,
            linear_key_head_dim=head,
            linear_value_head_dim=head,
            linear_num_key_heads=max(heads // 2, 1),
            linear_num_value_heads=heads,
            linear_conv_kernel_dim=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=hidden // 2,
            shared_expert_intermediate_size=hidden // 2,
            decoder_sparse_step=1,
        )
    )


def _mamba2(hidden: int = 128, blocks: int = 1) -> Any:
    """Falcon-H1: Mamba-2 and attention side by side in every layer."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    return FalconH1ForCausalLM(
        FalconH1Config(
            **_common(hidden),
            num_hidden_layers=3 * blocks,
            num_attention_heads=hidden // 32,
            num_key_value_heads=hidden // 64,
            head_dim=32,
            mamba_d_ssm=hidden,
            mamba_n_heads=hidden // 16,
            mamba_d_head=16,
            mamba_n_groups=1,
            mamba_d_state=32,
            mamba_d_conv=4,
            mamba_expand=1,
            mamba_chunk_size=64,
            mamba_rms_norm=False,
            bos_token_id=None,
        )
    )


_SHORT_CONVOLUTIONS = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "conv_L_cache": 3,
}
"""What every LFM2 here has."""


def _conv(hidden: int = 128) -> Any:
    """LFM2: gated short convolutions around an attention layer, whose windows are all of its state."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    return Lfm2ForCausalLM(
        Lfm2Config(
            **_common(hidden),
            **_SHORT_CONVOLUTIONS,
            num_attention_heads=hidden // 32,
            num_key_value_heads=hidden // 64,
            block_auto_adjust_ff_dim=False,
        )
    )


def _conv_moe() -> Any:
    """LFM2 with a mixture of experts, as wide as the kernel demands that SGLang fuses its prefill with on Hopper."""
    from transformers import Lfm2MoeConfig, Lfm2MoeForCausalLM

    hidden = 2048
    return Lfm2MoeForCausalLM(
        Lfm2MoeConfig(
            **_common(hidden),
            **_SHORT_CONVOLUTIONS,
            num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 256,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=hidden // 8,
            num_dense_layers=1,
        )
    )


def _kda() -> Any:
    """Kimi-Linear: three layers of Kimi delta attention to one of latent attention, with a small mixture of experts."""
    from sglang_hybrid.demo import kimi

    return kimi.KimiLinear(kimi.config(_common(128)))


def _attention(hidden: int = 128, blocks: int = 1) -> Any:
    """Qwen3: attention only, to show that models without recurrent layers are served too."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            **_common(hidden),
            num_hidden_layers=2 * blocks,
            num_attention_heads=hidden // 32,
            num_key_value_heads=hidden // 64,
            head_dim=32,
        )
    )


def _common(hidden: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "eos_token_id": SPECIAL_TOKENS.index(TURN_END),
        "pad_token_id": 0,
    }


VISION = "vision"
HEADS = (speculation.MTP, speculation.VISION_MTP)
"""Models whose own head drafts."""

READERS = ("reader-gdn", "reader-mamba2")
"""Trained models, `sglang_hybrid.demo.reader`."""

PRESETS: dict[str, Callable[[], Any]] = {
    "gdn": _gdn,
    "gdn-medium": lambda: _gdn(hidden=384, blocks=2),
    "gdn-heads128": lambda: _gdn(hidden=1024, blocks=2, head=128),  # heads that every GPU kernel takes
    "gdn-narrow": lambda: _gdn(hidden=256, head=128),  # the same heads, and what a state costs beside a token
    "mamba2": _mamba2,
    "conv": _conv,
    "conv-moe": _conv_moe,
    "kda": _kda,
    "attention": _attention,
    VISION: lambda: vision.model(_common(128)),
    speculation.MTP: lambda: speculation.target(_common(128)),
    speculation.VISION_MTP: lambda: vision.model({**_common(128), **speculation.HEAD}),
    speculation.DRAFT: lambda: speculation.draft(_common(128)),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sglang_hybrid.demo.model", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--preset", default="gdn", help=f"one of {', '.join((*READERS, *PRESETS))}")
    parser.add_argument("--weights", type=Path, default=None, help="safetensors file with trained weights")
    options = parser.parse_args(argv)
    try:
        print(build(options.folder, options.preset, options.weights))  # noqa: T201
    except ConfigError as error:
        parser.exit(2, f"error: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
