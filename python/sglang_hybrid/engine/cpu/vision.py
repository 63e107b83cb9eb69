"""Lets torchvision's wheel, which is built for CUDA, be imported next to a CPU build of PyTorch.

SGLang's configuration code imports torchvision; text models never call it. Its Python half only needs the schemas of
the operators whose binary cannot be loaded.
"""

from __future__ import annotations

from importlib.machinery import PathFinder

import torch

_OPERATORS = ("nms", "qnms")
_libraries: list[torch.library.Library] = []


def install() -> None:
    """Declare torchvision's operators; nothing to do on a CUDA build of PyTorch, without torchvision, or twice."""
    if _libraries or torch.version.cuda is not None or PathFinder.find_spec("torchvision") is None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in _OPERATORS:
        if hasattr(torch.ops.torchvision, operator):
            continue  # somebody else has declared it, for the same reason
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)
