"""Which states a prefill of the served model can give back, and what has to change where it gives one only."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_hybrid.core.served import ARCHITECTURES, Saves
from sglang_hybrid.engine import compat


@dataclass(frozen=True)
class PrefillStates:
    """States that a forward pass leaves behind.

    `step`: tokens between them, counted from where the pass begins; 0 if there is only the one that SGLang saves by
    itself. `source` says in words where they come from, `remedy` what gives more than one (empty: nothing does).
    """

    step: int
    source: str
    remedy: str = ""

    def shortcoming(self) -> str:
        """The warning of a server whose prefills give back one state only."""
        change = f"; start with {self.remedy} to change that" if self.remedy else ""
        return (
            "branch points and declared boundaries are NOT saved, a prefix is reused only from the end of an earlier "
            f"prefill or answer: a prefill gives back one state ({self.source}){change}"
        )

    def summary(self) -> str:
        """Half a line for the start block."""
        if not self.step:
            return f"ONE state each ({self.source})"
        if self.step == 1:
            return f"a state at any token, from {self.source}"
        return f"a state every {self.step} tokens, from {self.source}"


def of(model_runner: Any, server_args: Any, inside: bool) -> PrefillStates:
    """What prefills of `model_runner` give back; `inside`: our kernel gives states inside a chunk too."""
    settings = compat.resolved(server_args)
    if is_one_graph(settings):  # the index sets are those of the capture
        return PrefillStates(0, "a prefill that is one CUDA graph", "--cuda-graph-backend-prefill breakable")
    backend = linear_backend(model_runner)
    kind = type(backend).__name__
    architecture = model_runner.model_config.hf_config.architectures[0]
    row = ARCHITECTURES.get(architecture)
    if row is not None and row.saves is Saves.TAIL and kind in ("GDNAttnBackend", "Mamba2AttnBackend"):
        # Mamba-1 and JetBlocks run their own code inside these backends. It writes no further states; Mamba-1 asserts.
        return PrefillStates(0, f"{architecture}, whose layers keep the others to themselves")
    if is_short_convolution(backend) and row is not None and row.saves is Saves.ANY:
        return PrefillStates(1, "inputs of the convolutions")
    if kind == "Mamba2AttnBackend":
        # Before 0.5.21 its states lie on a grid that several requests in one pass do not share.
        if "track_ssm_recompute_dst" not in getattr(_metadata_type(), "__dataclass_fields__", {}):
            return PrefillStates(0, "Mamba-2 kernels before SGLang 0.5.21", "SGLang 0.5.21 or newer")
        return PrefillStates(chunk_tokens(backend), "chunks of the Mamba-2 kernels")
    if kind != "GDNAttnBackend" and not is_by_channel(backend):
        return PrefillStates(0, f"{kind}, whose kernels keep the others to themselves")
    dispatcher = backend.kernel_dispatcher
    kernel = type(dispatcher.extend_kernel).__name__
    if getattr(dispatcher, "extend_uses_state_checkpoints", False):
        return PrefillStates(compat.checkpoint_grid(), "FlashInfer's checkpoints, as precise as the pool")
    if kernel not in ("TritonGDNKernel", "TritonKDAKernel"):  # the CuTe one, for example
        remedy = "--linear-attn-prefill-backend triton"
        return PrefillStates(0, f"{kernel}, which keeps the others to itself", remedy)
    source = f"chunks of the delta-rule kernel, as {str(model_runner.dtype).removeprefix('torch.')}"
    if inside:
        return PrefillStates(1, f"{source}, and our kernel inside a chunk")
    return PrefillStates(chunk_tokens(backend), source)


def linear_backend(model_runner: Any) -> Any:
    """SGLang's backend of the recurrent layers: the only one of a model without attention, such as Mamba-Codestral."""
    whole = getattr(model_runner, "attn_backend", None)
    return getattr(whole, "linear_attn_backend", whole)


def is_by_channel(backend: Any) -> bool:
    """Whether `backend` runs a delta rule that forgets by channel: Kimi delta attention."""
    return type(backend).__name__ == "KDAAttnBackend"


def is_short_convolution(backend: Any) -> bool:
    """Whether `backend` keeps convolution windows beside layers that compute them by themselves."""
    return type(backend).__name__ == "ShortConvAttnBackend"


def is_in_graph(backend: Any) -> bool:
    """Whether a prefill's CUDA graph has the recurrent layers in it; those of most models run between its pieces.

    Short convolutions are part of it, and from SGLang 0.5.23 on so may Kimi delta attention be.
    """
    inside = getattr(backend, "supports_prefill_graph_extend", None)
    return is_short_convolution(backend) or (inside is not None and inside())


def is_one_graph(settings: Any) -> bool:
    """Whether a prefill is one CUDA graph, by SGLang's final `settings`."""
    graphs = getattr(settings, "cuda_graph_config", None)
    return getattr(getattr(graphs, "prefill", None), "backend", None) == "full"


def chunk_tokens(backend: Any) -> int:
    """Tokens per chunk of a backend's prefill kernel; GDN's is 64, and 0.5.17 says so nowhere."""
    return int(getattr(backend, "mamba_chunk_size", 64))


def whole_chunks(original: Callable[[Any], int], server_args: Any) -> int:
    """AROUND hook of mamba_cache_chunk_size: a grid on which the kernel has states, in multimodal models too.

    SGLang looks for the kernel's chunk in the whole configuration only. NemotronH-Omni has it in the part of the text:
    the states of its chunks of 128 tokens would be taken for those of a grid of 64, and prompts resume from wrong ones.
    """
    from sglang.srt.arg_groups.overrides import model_config_of

    chunk = getattr(model_config_of(server_args).hf_text_config, "mamba_chunk_size", None)
    return math.lcm(original(server_args), chunk or 1)


def _metadata_type() -> Any:
    from sglang.srt.layers.attention.mamba.mamba2_metadata import ForwardMetadata

    return ForwardMetadata
