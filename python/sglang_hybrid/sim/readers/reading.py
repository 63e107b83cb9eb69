"""What the readers of one trace share: how text becomes tokens, what to do with bad rows, what to tell the user."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from sglang_hybrid.sim.readers.text import tokenize
from sglang_hybrid.sim.trace import Tokens, TraceError

_FIRST_OF_NAMESPACES = 1 << 30  # above every vocabulary and every hashed token of a request log


class Reading:
    """The state of one `read_trace`: `notes` has what the user should know, each with how often it was met."""

    def __init__(self, skip_bad: bool = False, tokenizer: Path | None = None) -> None:
        self.skip_bad = skip_bad
        self.notes: Counter[str] = Counter()
        self._tokenizer = None if tokenizer is None else _load(tokenizer)
        self._texts = 0
        self._namespaces: dict[tuple[str, int], int] = {}

    def encode(self, text: str) -> Tokens:
        """int32 token ids of `text`, by the tokenizer or else by the estimate of `readers.text`; no special tokens."""
        self._texts += 1
        if self._tokenizer is None:
            return tokenize(text)
        text = text.encode("utf-8", "replace").decode()  # JSON may hold half a character, which tokenizers refuse
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def bad(self, error: TraceError) -> None:
        """Count a row that cannot be used, or raise `error` unless such rows are to be skipped."""
        if not self.skip_bad:
            raise error
        self.notes[f"bad rows were skipped, the first is {error}" if not self._bad else self._bad] += 1

    @property
    def _bad(self) -> str:
        return next((note for note in self.notes if note.startswith("bad rows")), "")

    def apart(self, tokens: Tokens, namespace: str) -> Tokens:
        """`tokens` so that those of another namespace are never shared: the first one is an id of this namespace."""
        if not namespace or not tokens.size:
            return tokens
        key = tokens.copy()
        number = _FIRST_OF_NAMESPACES + len(self._namespaces)
        key[0] = self._namespaces.setdefault((namespace, int(tokens[0])), number)
        return key

    def all_notes(self) -> tuple[str, ...]:
        """Every note as a sentence, how often in front where that is more than once."""
        lines = [f"{count:,} x: {note}" if count > 1 else note for note, count in self.notes.items()]
        if self._texts and self._tokenizer is None:
            lines.append("the trace holds text: token counts are estimates; --tokenizer FOLDER counts real ones")
        if self._tokenizer is not None and not self._texts:
            lines.append("the trace holds no text, the tokenizer had nothing to do")
        return tuple(lines)


def _load(path: Path) -> Any:
    """The tokenizer in the model folder or tokenizer.json at `path`; raises TraceError."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise TraceError(f"give a model folder with a tokenizer.json, or that file: {path}")
    try:
        import tokenizers
    except ImportError as error:
        raise TraceError(f"install a package to count real tokens, pip install tokenizers: {path}") from error
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises the bare class
        raise TraceError(f"not a tokenizer.json that can be read ({error}): {file}") from error
