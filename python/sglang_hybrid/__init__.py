"""sglang-hybrid: an overlay on SGLang for models that mix attention with recurrent layers."""

__version__ = "0.1.0"
