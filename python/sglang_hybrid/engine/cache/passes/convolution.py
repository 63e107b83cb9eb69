"""SGLang's Triton convolution of prefills, given few numbers of windows: each number makes a kernel of its own.

With the pool as windows there is one. With windows that are gathered for a pass each number of requests, or of rows
between segments, would be compiled in the middle of serving, and a scheduler would stand still for a second or more.
"""

from __future__ import annotations

from typing import Any

SIZES = (64, 256, 1024, 4096)
"""Numbers of windows that are given; what is more goes as it is."""


def in_sizes(original: Any, x: Any, *args: Any, conv_states: Any, **kwargs: Any) -> Any:
    """Run `original` on windows [n, channels, tokens] at the front of as many as one of `SIZES` says.

    Also an AROUND hook, with elastic memory: SGLang gathers the windows of a prefill's requests there.
    """
    count = len(conv_states)
    size = next((size for size in SIZES if count <= size), count)
    if count == size or not conv_states.is_contiguous():  # those of an elastic pool, which has memory here and there
        return original(x, *args, conv_states=conv_states, **kwargs)
    held = conv_states.new_empty(size, *conv_states.shape[1:])
    held[:count] = conv_states
    result = original(x, *args, conv_states=held, **kwargs)
    conv_states.copy_(held[:count])
    return result
