"""Requests of different namespaces never meet: a token that stands for the namespace comes before their own."""

from collections import OrderedDict
from hashlib import blake2b

import numpy as np

from sglang_hybrid.prefix.tree.tokens import Tokens, as_tokens

_FIRST = 1 << 30  # above every vocabulary
_MOST = 1 << 16


class Namespaces:
    """Numbers for namespaces, in order of their first request; beyond `_MOST` the one asked for longest ago goes."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[bytes, int] = OrderedDict()  # by digest: clients choose their length
        self._named = 0

    def keyed(self, tokens: Tokens, namespace: str | None) -> Tokens:
        """The tokens behind the one of their namespace."""
        tokens = as_tokens(tokens)
        key: Tokens = np.empty(tokens.size + 1, np.int32)
        key[0] = self.number(namespace)
        key[1:] = tokens
        return key

    def number(self, namespace: str | None) -> int:
        """The token that stands for `namespace`."""
        name = None if namespace is None else namespace.encode(errors="surrogatepass")
        digest = b"" if name is None else blake2b(name, digest_size=16).digest()
        number = self._numbers.pop(digest, None)
        if number is None:
            number = _FIRST + self._named
            self._named = (self._named + 1) % _FIRST
        self._numbers[digest] = number
        if len(self._numbers) > _MOST:
            self._numbers.popitem(last=False)
        return number

    @staticmethod
    def turn(key: Tokens) -> int:
        """Which namespace `key` is of, in order of their first requests, from 0."""
        return int(key[0]) - _FIRST
