"""Which hybrid architectures SGLang serves, where, and which states a prefill of them can save: docs/models.md.

The launcher refuses by this table what a machine without a GPU cannot compute. A test holds it against the installed
SGLang: a hybrid architecture that is not here fails it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class Where(Enum):
    """Where an architecture is served: everywhere, on a GPU only, or not at all (`spec` and the simulator know it)."""

    CPU = "CPU, GPU"
    GPU = "GPU"
    SPEC = "spec only"


class Saves(Enum):
    """Which states a prefill can leave in the cache, by what its kernels give back."""

    ANY = "branch points, boundaries, tail"
    TAIL = "tail"
    STOCK = "what SGLang's own cache saves"
    NONE = "nothing"


@dataclass(frozen=True)
class Served:
    """One architecture: `model_type` of its configuration, and the kinds of its layers that keep something.

    Kinds are of `core.layers.KINDS`. `example` is the preset whose sizes are shown. `extra_buffer`: SGLang allows that
    strategy for it. `not_on_cpu`: a kind of layer with which a CPU does not compute it. `cpu_since`: the version of
    SGLang whose model a CPU can build. `captured`: SGLang captures its recurrent layers in the CUDA graph of a prefill.
    `settled`: SGLang chooses how its states are cached; for others the launcher does (`engine/launch/unsettled.py`).
    Models without costs (`families.UNPRICED`) run on SGLang's own cache.
    """

    model_type: str
    where: Where
    saves: Saves
    kinds: tuple[str, ...]
    example: str = ""
    note: str = ""
    extra_buffer: bool = True
    not_on_cpu: str = ""
    cpu_since: str = ""
    captured: bool = False
    settled: bool = True


_MULTIMODAL = "the text part of a multimodal model"
_SEES = "a multimodal model, served with images on a CPU"
_LATENT = "latent attention"
_INDEXED = "an index beside KV: no segments and no elastic memory, a host tier from SGLang 0.5.23"

ARCHITECTURES: Mapping[str, Served] = MappingProxyType(
    {
        "Qwen3NextForCausalLM": Served(
            "qwen3_next", Where.CPU, Saves.ANY, ("gdn", "attention"), example="qwen3-next-80b-a3b"
        ),
        "Qwen3_5MoeForConditionalGeneration": Served(
            "qwen3_5_moe", Where.CPU, Saves.ANY, ("gdn", "attention"), example="qwen3.5-35b-a3b", note=_MULTIMODAL
        ),
        "Qwen3_5ForConditionalGeneration": Served(
            "qwen3_5", Where.CPU, Saves.ANY, ("gdn", "attention"), example="qwen3.5-27b", note=_SEES
        ),
        "Qwen3_5MoeForCausalLM": Served("qwen3_5_moe_text", Where.CPU, Saves.ANY, ("gdn", "attention")),
        "Qwen3_5ForCausalLM": Served("qwen3_5_text", Where.CPU, Saves.ANY, ("gdn", "attention")),
        "InternS2PreviewForConditionalGeneration": Served(
            "intern_s2_preview", Where.GPU, Saves.ANY, ("gdn", "attention"), note=_MULTIMODAL
        ),
        "InternS2MobiusForConditionalGeneration": Served(
            "interns2_mobius", Where.GPU, Saves.ANY, ("gdn", "attention"), note=_MULTIMODAL
        ),
        "MiniCPMV4_6ForConditionalGeneration": Served(
            "minicpmv4_6", Where.GPU, Saves.ANY, ("gdn", "attention"), note=_MULTIMODAL
        ),
        "MiniCPMV4_7ForConditionalGeneration": Served(
            "minicpmv4_7", Where.GPU, Saves.ANY, ("gdn", "attention"), note="from SGLang 0.5.23; " + _MULTIMODAL
        ),
        "GigaChat35ForCausalLM": Served("gigachat3_5", Where.GPU, Saves.ANY, ("gdn", "attention"), note=_LATENT),
        "JetNemotronForCausalLM": Served("jet_nemotron", Where.GPU, Saves.TAIL, ("gdn", "attention")),
        "JetVLMForConditionalGeneration": Served(
            "jet_vlm", Where.GPU, Saves.TAIL, ("gdn", "attention"), note=_MULTIMODAL
        ),
        "Qwen4ExpForConditionalGeneration": Served(
            "qwen4_exp", Where.GPU, Saves.ANY, ("gdn", "attention", "ngram"), note=f"{_MULTIMODAL}; {_INDEXED}"
        ),
        "KimiLinearForCausalLM": Served(
            "kimi_linear",
            Where.CPU,
            Saves.ANY,
            ("kda", "attention"),
            example="kimi-linear-48b-a3b",
            note=f"{_LATENT}; on a CPU from SGLang 0.5.21",
            cpu_since="0.5.21",
        ),
        "KimiK3ForConditionalGeneration": Served(
            "kimi_k3", Where.GPU, Saves.ANY, ("kda", "attention"), note=f"{_MULTIMODAL}; {_LATENT}"
        ),
        "KimiK3LinearForCausalLM": Served(
            "kimi_linear", Where.GPU, Saves.ANY, ("kda", "attention"), note=_LATENT, settled=False
        ),
        "BailingMoeV3ForCausalLM": Served("bailing_hybrid", Where.GPU, Saves.ANY, ("kda", "attention"), note="Ling 3"),
        "BailingMoeV3VLForConditionalGeneration": Served(
            "bailing_moe_v3_vl", Where.GPU, Saves.ANY, ("kda", "attention"), note=_MULTIMODAL
        ),
        "Glm5NextForConditionalGeneration": Served(
            "glm5_next",
            Where.GPU,
            Saves.ANY,
            ("kda", "attention"),
            note=f"GLM-5.3-Flash; {_MULTIMODAL}; {_LATENT}; {_INDEXED}",
        ),
        "BailingMoeV2_5ForCausalLM": Served(
            "bailing_hybrid", Where.GPU, Saves.TAIL, ("lightning", "attention"), note="Ling and Ring 2.5"
        ),
        "BailingMoeLinearV2ForCausalLM": Served(
            "bailing_moe_linear",
            Where.SPEC,
            Saves.NONE,
            ("lightning", "attention"),
            example="ring-mini-linear-2.0",
            note="Ling and Ring linear 2.0",
        ),
        "MiniCPMSALAForCausalLM": Served(
            "minicpm_sala",
            Where.GPU,
            Saves.NONE,
            ("lightning", "attention"),
            example="minicpm-sala",
            note="SGLang turns prefix caching off for it",
        ),
        "MiniMaxForCausalLM": Served(
            "minimax", Where.SPEC, Saves.NONE, ("lightning", "attention"), example="minimax-text-01"
        ),
        "MiniMaxText01ForCausalLM": Served("minimax_text_01", Where.SPEC, Saves.NONE, ("lightning", "attention")),
        "MiniMaxM1ForCausalLM": Served("minimax_m1", Where.SPEC, Saves.NONE, ("lightning", "attention")),
        "NemotronHForCausalLM": Served(
            "nemotron_h",
            Where.CPU,
            Saves.ANY,
            ("mamba2", "attention"),
            example="nemotron-3-nano-30b-a3b",
            note="a CPU serves those without experts",
            not_on_cpu="moe",
        ),
        "NemotronH_Nano_VL_V2": Served(
            "NemotronH_Nano_VL_V2", Where.GPU, Saves.ANY, ("mamba2", "attention"), note=_MULTIMODAL, settled=False
        ),
        "NemotronH_Nano_Omni_Reasoning_V3": Served(
            "NemotronH_Nano_Omni_Reasoning_V3",
            Where.GPU,
            Saves.ANY,
            ("mamba2", "attention"),
            note=_MULTIMODAL,
            settled=False,
        ),
        "NemotronH_Omni_Reasoning_V3": Served(
            "nemotron_h_omni", Where.GPU, Saves.ANY, ("mamba2", "attention"), note=_MULTIMODAL
        ),
        "NemotronHPuzzleForCausalLM": Served("nemotron_h_puzzle", Where.GPU, Saves.ANY, ("mamba2", "attention")),
        "FalconH1ForCausalLM": Served(
            "falcon_h1",
            Where.CPU,
            Saves.ANY,
            ("mamba2", "attention"),
            example="falcon-h1-7b",
            note="a GPU prefills it without CUDA graphs",
            captured=True,
        ),
        "GraniteMoeHybridForCausalLM": Served(
            "granitemoehybrid", Where.CPU, Saves.ANY, ("mamba2", "attention"), example="granite-4.0-h-small"
        ),
        "Mamba2ForCausalLM": Served(
            "mamba2", Where.GPU, Saves.ANY, ("mamba2",), example="mamba-codestral-7b", settled=False
        ),
        "BambaForCausalLM": Served("bamba", Where.SPEC, Saves.NONE, ("mamba2", "attention")),
        "Zamba2ForCausalLM": Served("zamba2", Where.SPEC, Saves.NONE, ("mamba2", "attention"), example="zamba2-7b"),
        "MambaForCausalLM": Served("mamba", Where.GPU, Saves.TAIL, ("mamba1",), settled=False),
        "FalconMambaForCausalLM": Served(
            "falcon_mamba", Where.GPU, Saves.TAIL, ("mamba1",), example="falcon-mamba-7b", settled=False
        ),
        "JambaForCausalLM": Served("jamba", Where.SPEC, Saves.NONE, ("mamba1", "attention"), example="jamba-1.5-mini"),
        "Lfm2ForCausalLM": Served(
            "lfm2", Where.CPU, Saves.ANY, ("conv", "attention"), example="lfm2-1.2b", extra_buffer=False
        ),
        "Lfm2MoeForCausalLM": Served(
            "lfm2_moe", Where.CPU, Saves.ANY, ("conv", "attention"), example="lfm2-8b-a1b", extra_buffer=False
        ),
        "Lfm2VlForConditionalGeneration": Served(
            "lfm2_vl", Where.GPU, Saves.ANY, ("conv", "attention"), note=_MULTIMODAL, settled=False
        ),
        "ZayaForCausalLM": Served("zaya", Where.GPU, Saves.TAIL, ("cca",), example="zaya1-8b"),
        "InklingForConditionalGeneration": Served("inkling_mm_model", Where.GPU, Saves.STOCK, ("conv", "attention")),
    }
)


def of_layers(kinds: Collection[str]) -> Served | None:
    """The first architecture whose recurrent layers are among `kinds`: what models of the kind do. None without any."""
    return next((row for row in ARCHITECTURES.values() if row.kinds[0] in kinds), None)
