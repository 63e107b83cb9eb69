"""How well a reader reads by kind of question, context length and number of documents: the model alone, full prefill.

    python -m benchmarks.quality.reading [--model reader-gdn] [--questions 500]

Greedy answers of the network in PyTorch, which gives the tokens that transformers and SGLang give (`tests/unit/demo`).
Names, sentence forms and question forms are held out.
"""

from __future__ import annotations

import torch

from benchmarks import provenance
from benchmarks.quality import study
from benchmarks.quality.questions import rows
from sglang_hybrid.demo.reader import evaluation, weights
from sglang_hybrid.demo.reader.names import HELD

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
DOCUMENTS = (2, 5, 10, 20, 40)
"""In 2,048 tokens: from two long documents to many of one or two sentences."""


def main() -> None:
    parser = study.parser(__doc__)
    parser.add_argument("--questions", type=int, default=500, help="of each kind at least, in each cell")
    options = parser.parse_args()
    torch.set_num_threads(1)
    head = provenance.head("torch", "tokenizers", "sglang-hybrid")
    network = weights.network(options.model)
    cells = [(length, None) for length in LENGTHS] + [(2048, documents) for documents in DOCUMENTS]
    made = []
    for length, documents in cells:
        counts = evaluation.score(network, evaluation.drawn(length, HELD, options.questions, documents))
        made.append({"length": length, "documents": documents, "rows": rows(counts)})
        print(length, documents, {row["kind"]: row["share"] for row in made[-1]["rows"]}, flush=True)
    study.write("reading", options.model, head, cells=made)


if __name__ == "__main__":
    main()
