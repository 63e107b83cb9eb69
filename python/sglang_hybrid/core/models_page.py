"""Writes docs/models.md: `python -m sglang_hybrid.core.models_page > docs/models.md`."""

from collections.abc import Iterator

from sglang_hybrid.core.families import UNPRICED
from sglang_hybrid.core.layers import KINDS
from sglang_hybrid.core.models import HUB_NAMES
from sglang_hybrid.core.served import ARCHITECTURES, Served
from sglang_hybrid.core.spec import PRESETS, ModelSpec

_STATELESS = {"mlp", "moe", "streams"}

_HEAD = """# Models

<!-- Written by `python -m sglang_hybrid.core.models_page > docs/models.md`; change `core/served.py`, not this file. -->

Hybrid models, by the name in `architectures` of a config.json. The table is of SGLang 0.5.21; older versions lack some
of them. Every other model of SGLang has attention only: it is served, with SGLang's plain prefix cache.

`sglang-hybrid spec FOLDER` prints the sizes of any model whose family is here, and how much a budget holds of them.

- **Served on**: with our cache, unless the next column says otherwise. *GPU* means that SGLang serves it there and that
  sizes were compared with SGLang's own; nothing was run on one ([gpu.md](gpu.md)). *CPU* means that a small model of it
  was served without a GPU, with hits. There the launcher refuses the others. *spec only* means that SGLang has no such
  model: `spec` and the simulator know its costs.
- **A prefill saves**: the states that one prefill can leave in the cache. Where that is the tail only, a prefix is
  reused from the end of an earlier prefill or answer.
- **Layers** and sizes are those of the model in the last column, with bfloat16 KV and windows; `attention` has KV, the
  other kinds have states.
"""

_KINDS = {
    "attention": "full attention, or latent, or over tokens that an index chooses, where it says so",
    "cca": "attention behind convolutions, which has KV and windows",
    "conv": "gated short convolution",
    "gdn": "gated delta rule (gated DeltaNet)",
    "kda": "Kimi delta attention",
    "lightning": "lightning attention: linear, with a fixed decay per head",
    "mamba1": "Mamba",
    "mamba2": "Mamba-2",
    "ngram": "embedding of n-grams behind a convolution, which has a window",
}


def page() -> str:
    """The text of docs/models.md."""
    return "\n".join([_HEAD, *_table(), "", *_unpriced(), "", *_kinds(), "", *_presets()]) + "\n"


def _table() -> Iterator[str]:
    yield "| architecture | layers | state, bytes | KV of a token | served on | a prefill saves | sizes of; notes |"
    yield "|---|---|---|---|---|---|---|"
    for name, row in ARCHITECTURES.items():
        spec = PRESETS[row.example] if row.example else None
        sizes = (f"{spec.checkpoint_bytes:,}", f"{spec.kv_bytes_per_token:,}") if spec else ("", "")
        notes = "; ".join(note for note in (row.example, _note(row)) if note)
        cells = (f"`{name}`", _layers(row, spec), *sizes, row.where.value, row.saves.value, notes)
        yield f"| {' | '.join(cells)} |"


def _layers(row: Served, spec: ModelSpec | None) -> str:
    counts = spec.layer_counts if spec else {}
    return ", ".join(f"{counts[kind]} {kind}" if counts else kind for kind in row.kinds)


def _note(row: Served) -> str:
    return "no costs, see below" if row.model_type in UNPRICED else row.note


def _unpriced() -> Iterator[str]:
    yield "## Without costs"
    yield ""
    yield "SGLang serves these, with its own cache and its own sizes; the launcher says so before the start."
    yield ""
    for name, row in ARCHITECTURES.items():
        if row.model_type in UNPRICED:
            yield f"- `{name}`, {UNPRICED[row.model_type]}"


def _kinds() -> Iterator[str]:
    yield "## Kinds of layers"
    yield ""
    for kind in KINDS:
        if kind not in _STATELESS:
            yield f"- `{kind}`: {_KINDS[kind]}"


def _presets() -> Iterator[str]:
    yield "## Presets"
    yield ""
    yield "`spec` and `simulate` take these names, or those of the model hub:"
    yield ""
    for preset in PRESETS:
        hub = [f"`{name}`" for name, known in HUB_NAMES.items() if known == preset]
        yield f"- `{preset}`" + (f": {', '.join(hub)}" if hub else ", of the Marconi paper")


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201
