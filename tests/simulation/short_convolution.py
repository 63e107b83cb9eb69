"""The fingerprint of LFM2, whose state is a window: the last inputs of each convolution, and nothing else.

An input is a token and, in the channels behind it, the checksum of all tokens up to it. So a window that was cut at
another token, or of another request, is found as any wrong state is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.simulation.fingerprint import FingerprintModel, Row, digits, undigits

STATE = slice(1, 5)
"""Channels of an input that hold the checksum."""


class FingerprintConvolutions(FingerprintModel):
    """Takes the place of `model.forward` of LFM2."""

    def _track_windows(self, batch: Any, tokens: np.ndarray) -> None:
        """SGLang has no buffer for them."""

    def _track_states(self, rows: list[Row]) -> None:
        """Cut the windows that our hook wants of this pass, out of what its convolution is given."""
        from sglang_hybrid.engine.cache.passes import windows

        if windows._cuts is None:
            return
        inputs = torch.zeros(self._windows.shape[1], sum(row.tokens.size for row in rows))
        inputs[0] = torch.tensor(np.concatenate([row.tokens for row in rows]))
        inputs[STATE] = torch.tensor([digits(state) for row in rows for state in row.states()]).T
        windows.save(lambda *_, **__: None, inputs, conv_states=self._windows)

    def _read(self, slot: int) -> int:
        return undigits(self._windows[slot, STATE, -1])

    def _write(self, slot: int, state: int) -> None:
        self._windows[slot, STATE, -1] = torch.tensor(digits(state), dtype=self._windows.dtype)
