"""Compiled grammars of clients: a scheduler keeps the latest."""

from __future__ import annotations

import itertools
from collections import OrderedDict

from sglang_hybrid.engine.frontend.validation import limits


def test_compiled_grammars_have_an_end() -> None:
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend

    backend, text = BaseGrammarBackend(), "x" * 60_000
    kept = []
    for number in range(200):
        key = ("regex", f"{number}{text}")
        backend.set_cache(key, object())
        assert key in backend.cache
        kept.append(sum(len(each) for _, each in backend.cache))
    assert limits.GRAMMARS - 2 * len(text) < max(kept) <= limits.GRAMMARS
    assert sum(later < earlier for earlier, later in itertools.pairwise(kept)) == 2, "two rounds of forgetting"


def test_the_compiler_behind_a_reasoning_parser_forgets_too() -> None:
    """SGLang's backend around another forgets what it keeps itself, and the compiler keeps every grammar."""
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend
    from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarBackend

    class Compiler(BaseGrammarBackend):
        forgot = 0

        def reset(self) -> None:
            super().reset()
            self.forgot += 1

    backend = ReasonerGrammarBackend.__new__(ReasonerGrammarBackend)
    BaseGrammarBackend.__init__(backend)
    backend.grammar_backend, backend._budget_variant_keys = Compiler(), OrderedDict()  # the latter since 0.5.23
    for number in range(100):
        backend.set_cache(("regex", f"{number}{'x' * 60_000}"), object())
    assert backend.grammar_backend.forgot == 1
