"""transformers imports torchvision, whose wheel does not load next to a CPU build of PyTorch without this."""

from sglang_hybrid.engine.cpu import vision

vision.install()
