"""A portable CPU platform for SGLang: PyTorch in place of the compiled kernels its CPU path needs.

| what SGLang lacks on a plain CPU         | where it comes from                        | how it gets in               |
|------------------------------------------|--------------------------------------------|------------------------------|
| torchvision's operators                  | vision.py (schemas only)                   | install(), before the import |
| the sgl_kernel extension                 | sgl_kernel.py -> causal_conv, gdn, fused   | install(), before the import |
| Kimi delta attention                     | kda.py, causal_conv.py                     | register_hooks()             |
| Mamba-2 scan and update                  | mamba2.py, causal_conv.py                  | register_hooks()             |
| attention that skips the cached rows     | attention.py                               | register_hooks()             |
| gated norms, shared expert gate, scaling | norm.py, fused.py                          | register_hooks()             |
| pages of several tokens                  | pages.py                                   | register_hooks()             |
| checkpoints of the extra_buffer strategy | checkpoint.py, pinning.py, extra_buffer.py | register_hooks()             |
| copies between HiCache's two tiers       | ../hicache/copies.py                       | register_hooks()             |
| verification of drafts, draft models     | speculation/                               | both                         |
"""

from __future__ import annotations

import torch

from sglang_hybrid.engine.cpu import sgl_kernel, vision

_installed = False


def install() -> bool:
    """Put the stand-ins in place, before SGLang imports torchvision and sgl_kernel; returns whether they are active.

    Does nothing on a machine with CUDA or with an sgl_kernel that has CPU kernels, nor when called again.
    """
    global _installed
    if not _installed and not torch.cuda.is_available() and not sgl_kernel.is_real():
        vision.install()
        sgl_kernel.install()
        _installed = True
    return _installed


def register_hooks() -> list[str]:
    """Register the hooks of this platform and return those that are required; [] where install() did nothing.

    Imports SGLang's model code: call it from SGLang's plugin entry point, not earlier.
    """
    if not _installed:
        return []
    from sglang_hybrid.engine.surface import registration

    registration.replace("cpu")
    return registration.register(["cpu"])
