"""The readers' published weights: bfloat16 values in safetensors, beside the model card that names their hash."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.demo.reader import tokens

FOLDER = Path(__file__).with_name("weights")


def path(model: str) -> Path:
    return FOLDER / f"{model}.safetensors"


def card(model: str) -> dict[str, Any]:
    """The model card of `model`. Raises ConfigError where it is missing or damaged."""
    file = FOLDER / f"{model}.json"
    try:
        content: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"the model card is missing or damaged; {_remedy(model)}: {file}") from error
    return content


def checked(model: str) -> Path:
    """The weight file of `model`. Raises ConfigError where it is missing, or not what its card says."""
    file = path(model)
    if not file.is_file():
        raise ConfigError(f"the weights are missing; {_remedy(model)}: {file}")
    if digest(file) != card(model).get("sha256"):
        raise ConfigError(f"the weights are damaged or not those of the model card; {_remedy(model)}: {file}")
    return file


def head(model: str) -> Path | None:
    """The weight file of the head that drafts for the published `model`, None where it has none.

    Raises ConfigError where it is missing, not what the card says, or of other weights of the model.
    """
    entry = card(model).get("drafting")
    if entry is None:
        return None
    file = head_path(model)
    if not file.is_file():
        raise ConfigError(f"the weights of the head are missing; {_remedy(model)}: {file}")
    if (digest(file), card(model)["sha256"]) != (entry["sha256"], entry["reader"]):
        raise ConfigError(f"the head is damaged, or of another training of {model}; {_remedy(model)}: {file}")
    return file


def head_path(model: str) -> Path:
    return FOLDER / f"{model}-head.safetensors"


def _remedy(model: str) -> str:
    return f"install again, or train {model} anew (docs/reader.md)"


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def network(model: str, file: Path | None = None) -> Any:
    """The network of `model` with its published weights, or those of `file`, in float32."""
    from safetensors.torch import load_file

    from sglang_hybrid.demo.reader.network import models

    made = models.READERS[model](tokens.VOCABULARY)
    made.load_state_dict(load_file(file or checked(model)))
    return made.float().eval()


def halfway(model: str, state: dict[str, Any], began: str) -> dict[str, Any]:
    """Half way from the published weights to `state`, the end of a training that began with them: float32.

    The noise of the last steps cancels out, so it finds facts better than either end (Lookahead, Zhang et al., 2019).
    Raises ConfigError where the published weights are not those of the digest `began`.
    """
    if card(model)["sha256"] != began:
        raise ConfigError(
            f"the training began with weights that are not published any more; check them out first: {began}"
        )
    first = network(model).state_dict()
    return {name: (first[name] + weight.detach().cpu().float()) / 2 for name, weight in state.items()}


def write(state: dict[str, Any], file: Path) -> None:
    """Write a network's weights rounded to bfloat16; the file is there whole or not at all."""
    import torch
    from safetensors.torch import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    rounded = {name: weight.detach().cpu().to(torch.bfloat16).contiguous() for name, weight in state.items()}
    save_file(rounded, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(file)


def build(folder: Path, model: str, file: Path | None = None) -> None:
    """Write configuration, tokenizer, chat template and weights of `model` into `folder`, as servers load them."""
    from safetensors import SafetensorError, safe_open

    from sglang_hybrid.demo.reader.network import models

    source = file or checked(model)
    configuration = models.CONFIGURATIONS[model](
        tokens.VOCABULARY, tokens.special_id(tokens.END), tokens.special_id(tokens.PAD)
    )
    drafts = None if file else head(model)
    if drafts is not None:  # beside the model's own file, which stays what it is
        configuration |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
        (folder / "mtp.safetensors").write_bytes(drafts.read_bytes())
    try:
        with safe_open(source, "pt") as content:
            found = {name: tuple(content.get_slice(name).get_shape()) for name in content.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"the weight file cannot be read; {_remedy(model)}: {source}") from error
    wanted = {
        name: tuple(weight.shape) for name, weight in models.READERS[model](tokens.VOCABULARY).state_dict().items()
    }
    if found != wanted:
        raise ConfigError(f"the weight file has other tensors than {model}; {_remedy(model)}: {source}")
    (folder / "config.json").write_text(json.dumps(configuration, indent=1) + "\n")
    stop = {"eos_token_id": configuration["eos_token_id"], "pad_token_id": configuration["pad_token_id"]}
    (folder / "generation_config.json").write_text(json.dumps(stop, indent=1) + "\n")
    if configuration["tie_word_embeddings"]:
        (folder / "model.safetensors").write_bytes(source.read_bytes())
    else:
        _with_a_head(source, folder / "model.safetensors")
    tokens.save(folder)


def _with_a_head(source: Path, target: Path) -> None:
    """Write the weights of `source` and, as the head of its own that the configuration announces, the embedding."""
    from safetensors.torch import load_file, save_file

    weights = load_file(source)
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, target, {"format": "pt"})
