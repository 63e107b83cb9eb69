"""Hot prefixes announced before the first request."""

import json
from pathlib import Path

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.prefix.tree.tokens import Tokens, as_tokens


def read_prefixes(path: str) -> list[Tokens]:
    """The prefixes of a JSONL file, one `{"input_ids": [...]}` a line; none for an empty path.

    Raises ConfigError for a file that cannot be read, and names the line that is no prefix.
    """
    if not path:
        return []
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the file of hot prefixes ({error}): {path}") from error
    prefixes = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            ids = json.loads(line)["input_ids"]
            prefixes.append(as_tokens(ids))
        except (ValueError, TypeError, KeyError, ConfigError) as error:
            raise ConfigError(
                f'a hot prefix is a line like {{"input_ids": [1, 2]}}; {path}, line {number}: {line[:80]!r}'
            ) from error
    return prefixes
