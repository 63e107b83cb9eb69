"""What a model folder must hold: a path that exists, whole weight files, a tokenizer."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from sglang_hybrid.core.errors import ConfigError

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_VOCABULARIES = ("tokenizer.*", "tokenization_*.py", "vocab.*", "spiece.model", "tekken.json", "*.tiktoken", "*.gguf")
_INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""


def refuse_typo(path: str) -> None:
    """Raise ConfigError if `path`, which does not exist, names a local folder rather than a model of the hub.

    `ORG/MODEL` and `FOLDER/MODEL` look alike: it is a folder's name where FOLDER, or a model of nearly that name, is
    on this disk.
    """
    wanted = Path(path).expanduser()
    parent = wanted.parent
    near = _near(wanted)
    if near:
        raise ConfigError(f"no such model folder; did you mean {' or '.join(near)}? {path}")
    if len(wanted.parts) > 1 and parent.is_dir():
        raise ConfigError(
            f"no such model folder; correct the path, or start elsewhere if it is a hub name, since {parent} is a "
            f"folder here: {path}"
        )


def _near(wanted: Path) -> list[str]:
    """Model folders with names like `wanted`, in its parent or in folders with names like its parent."""
    parents = [wanted.parent]
    if not wanted.parent.is_dir() and wanted.parent.parent.is_dir():
        names = [entry.name for entry in wanted.parent.parent.iterdir() if entry.is_dir()]
        parents = [wanted.parent.parent / name for name in difflib.get_close_matches(wanted.parent.name, names)]
    here = [entry for parent in parents if parent.is_dir() for entry in parent.iterdir()]
    models = {str(entry): entry.name for entry in here if (entry / "config.json").is_file()}
    close = set(difflib.get_close_matches(wanted.name, models.values(), n=3, cutoff=0.5))
    if not close and wanted.parent.name not in ("", "."):
        close = set(list(models.values())[:3])
    return sorted(path for path, name in models.items() if name in close)


def check_weights(folder: Path) -> None:
    """Raise ConfigError if `folder` holds no weights, lacks files of its index, or one is cut short."""
    if not any(file.suffix in WEIGHT_SUFFIXES for file in folder.iterdir()):
        raise ConfigError(f"the model folder holds no weights; complete it or pass --load-format dummy: {folder}")
    index = folder / _INDEX
    if index.is_file():
        named = _parsed(index.read_bytes(), index).get("weight_map")
        missing = sorted({str(n) for n in (named or {}).values() if not (folder / str(n)).is_file()})
        if missing:
            raise ConfigError(f"files of the model that {_INDEX} names are missing; fetch them: {', '.join(missing)}")
    for file in sorted(folder.glob("*.safetensors")):
        _check_safetensors(file)


def tensor_names(path: str, load_format: str) -> set[str] | None:
    """Names of the tensors that SGLang loads from the folder `path`, whose files are whole.

    None if none is safetensors, or none is loaded: the format `dummy`.
    """
    if load_format == "dummy":
        return None
    folder = Path(path).expanduser()
    index = folder / _INDEX
    if index.is_file():
        return set(_parsed(index.read_bytes(), index).get("weight_map") or {})
    names: set[str] = set()
    found = sorted(folder.glob("*.safetensors"))
    for file in found:
        with file.open("rb") as source:
            length = int.from_bytes(source.read(8), "little")
            names.update(_parsed(source.read(length), file))
    return names - {"__metadata__"} if found else None


def _check_safetensors(file: Path) -> None:
    """Compare the size of `file` with what its header promises: a length in 8 bytes, JSON, the tensors."""
    size = file.stat().st_size
    with file.open("rb") as source:
        start = source.read(8)
        if start == b"version ":
            raise ConfigError(f"a weight file is a pointer of Git LFS; run git lfs pull: {file}")
        length = int.from_bytes(start, "little")
        if size < 8 or length > _LONGEST_HEADER:
            raise ConfigError(f"a weight file is not safetensors; fetch it again: {file} ({size:,} bytes)")
        header = _parsed(source.read(length), file) if size >= 8 + length else {}
    try:
        tensors = (entry for name, entry in header.items() if name != "__metadata__")
        promised = 8 + length + max((int(entry["data_offsets"][1]) for entry in tensors), default=0)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ConfigError(f"the header of a weight file is damaged ({error!r}); fetch it again: {file}") from error
    if size != promised:
        raise ConfigError(
            f"a weight file is {'cut short' if size < promised else 'too long'}, its header promises {promised:,} "
            f"bytes{'' if header else ' or more'}; fetch it again: {file} ({size:,} bytes)"
        )


def _parsed(text: bytes, file: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"a file of the model is damaged ({error}); fetch it again: {file}") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"a file of the model is damaged, it holds no JSON object; fetch it again: {file}")
    return parsed


def check_tokenizer(namespace: Any) -> None:
    """Raise ConfigError if the tokenizer comes from a folder that holds no vocabulary."""
    if namespace.skip_tokenizer_init:
        return
    folder = Path(namespace.tokenizer_path or namespace.model_path).expanduser()
    if folder.is_dir() and not any(file for pattern in _VOCABULARIES for file in folder.glob(pattern)):
        raise ConfigError(
            "the folder holds no tokenizer (tokenizer.json, tokenizer.model, vocab.json or the like); complete it, or "
            f"pass --tokenizer-path, or --skip-tokenizer-init for requests in token ids: {folder}"
        )
