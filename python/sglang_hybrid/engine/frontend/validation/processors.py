"""Logit processors of clients are read before SGLang's scheduler has to (`scheduler.processors`)."""

from __future__ import annotations

from typing import Any

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.frontend.validation.limits import given_values, shown


def require_readable(given: Any) -> None:
    """Raise ConfigError unless every processor of a request, in SGLang's text form, can be made and called."""
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    for text in given_values(given):
        try:
            CustomLogitProcessor.from_str(text)
        except Exception as error:  # whatever code of a client does
            raise ConfigError(
                "custom_logit_processor is what to_str() of its class gives, of a class that can be made here "
                f"({type(error).__name__}: {shown(str(error))}): {shown(text)}"
            ) from error
