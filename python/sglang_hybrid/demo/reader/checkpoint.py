"""Checkpoints of a training: written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from sglang_hybrid.core.errors import ConfigError

NAME = "checkpoint.pt"


def save(folder: Path, content: dict[str, Any]) -> None:
    """Write `content` beside the last checkpoint, then put it in its place; a full disk leaves the last one."""
    partial = folder / f"{NAME}.partial"
    try:
        with partial.open("wb") as sink:
            torch.save(content, sink)
            sink.flush()
            os.fsync(sink.fileno())
        partial.replace(folder / NAME)
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"no checkpoint could be written; make room, then go on with --resume: {folder}") from error


def load(folder: Path) -> dict[str, Any]:
    """The last checkpoint of `folder`. Raises ConfigError where there is none or it cannot be read."""
    path = folder / NAME
    if not path.is_file():
        raise ConfigError(f"nothing to resume; train without --resume first: {path}")
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has no one exception for a damaged file
        raise ConfigError(f"the checkpoint cannot be read; train again without --resume: {path}") from error
    return content
