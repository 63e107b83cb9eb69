"""Logit processors of clients (`--enable-custom-logit-processor`): code that one sends and everybody's scheduler runs.

One that cannot be read, that raises, or that leaves no token to choose ends SGLang's scheduler (0.5.17 to 0.5.23). Here
the request of the second ends with 400, and a row of the third stays as the model gave it; of the first,
`frontend.validation.processors` tells.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

from sglang_hybrid.engine.frontend.validation.limits import shown

logger = logging.getLogger(__name__)

_nameless: dict[str, WeakSet[Any]] = {}
"""Running requests by the text of their processor, without parameters in which SGLang names the request."""


def note(_: None, req: Any, *__: Any, **___: Any) -> None:
    """AFTER hook of `Req.__init__`: remember who runs a processor without parameters."""
    text = req.custom_logit_processor
    if text and not isinstance(req.sampling_params.custom_params, dict):
        for known in [known for known, running in _nameless.items() if not running]:
            del _nameless[known]
        _nameless.setdefault(text, WeakSet()).add(req)


def guard(original: Callable[..., Any], text: str) -> Callable[..., Any]:
    """AROUND hook of the function that makes a processor's class of its text."""
    made = original(text)
    if not callable(made):
        raise TypeError(f"no class: {type(made).__name__}")
    return partial(Guarded, made, text)


class Guarded:
    """A processor whose errors are those of the requests that it was called for."""

    def __init__(self, make: Callable[[], Any], text: str) -> None:
        self._processor, self._text = make(), text
        if not callable(self._processor):
            raise TypeError(f"its instances cannot be called: {type(self._processor).__name__}")

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """SGLang asks for a processor's class."""
        return type(self._processor)

    def __call__(self, logits: Any, custom_param_list: list[Any] | None = None) -> Any:
        """Of the shape of `logits`, [rows, vocabulary]; `custom_param_list` has one entry per row."""
        try:
            return self._processed(logits, custom_param_list)
        except Exception:  # of any of the rows
            params = custom_param_list or [None] * len(logits)
            rows = logits.clone()
            for number, each in enumerate(params):
                one = slice(number, number + 1)
                try:
                    rows[one] = self._processed(logits[one], [each])
                except Exception as error:
                    self._end(each, error)
            return rows

    def _processed(self, logits: Any, params: list[Any] | None) -> Any:
        import torch

        found = self._processor(logits.clone(), params)
        if not isinstance(found, torch.Tensor) or found.shape != logits.shape:
            shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise ValueError(f"it returned {shape}, not {tuple(logits.shape)}")
        usable = torch.isfinite(found.amax(-1, keepdim=True))  # nothing is asked of the device here
        return torch.where(usable, found, logits)

    def _end(self, params: Any, error: Exception) -> None:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        said = f"custom_logit_processor failed ({type(error).__name__}): {shown(str(error))}"
        named = params.get("__req__") if isinstance(params, dict) else None
        for req in [named] if named is not None else list(_nameless.get(self._text, ())):
            if req.finished_reason is None and req.to_finish is None:
                logger.warning("%s ends: %s", req.rid, said)
                req.to_finish = FINISH_ABORT(said, 400, "BadRequestError")
