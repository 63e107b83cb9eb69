"""What a tree of pages compares: requests share whole pages, and only with requests of their own namespace."""

import numpy as np

from sglang_hybrid.prefix.tree.tokens import TOKEN_BYTES, Tokens

_NAMESPACED = 1 << 30  # above every vocabulary


class Keys:
    """Token sequences as keys of a radix tree whose nodes are whole pages of `page` tokens, as SGLang's are.

    Every token of a page stands for the whole page, so two keys part at a page's first token or not at all.
    """

    def __init__(self, page: int = 1) -> None:
        self._page = page
        self._first: dict[tuple[str, int], int] = {}
        self._pages: dict[tuple[str | None, bytes], int] = {}

    def of(self, tokens: Tokens, namespace: str | None = None) -> Tokens:
        """The key of the whole pages of `tokens`, an int32 array; those of different namespaces part at once."""
        if self._page == 1:
            return self._of_tokens(tokens, namespace)
        raw, size = tokens.tobytes(), self._page * TOKEN_BYTES
        whole = tokens.size // self._page
        numbers = [self._number(None if at else namespace, raw[at * size : (at + 1) * size]) for at in range(whole)]
        return np.repeat(np.array(numbers, dtype=np.int32), self._page)

    def _number(self, namespace: str | None, page: bytes) -> int:
        return self._pages.setdefault((namespace, page), len(self._pages))

    def _of_tokens(self, tokens: Tokens, namespace: str | None) -> Tokens:
        if namespace is None or not tokens.size:
            return tokens
        key = tokens.copy()
        key[0] = self._first.setdefault((namespace, int(tokens[0])), _NAMESPACED + len(self._first))
        return key
