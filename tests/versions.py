"""Which tests ask for more than the installed SGLang has: they are skipped, and say what it lacks."""

from __future__ import annotations

import pytest

from sglang_hybrid.engine import compat


def since(version: str, lacking: str) -> pytest.MarkDecorator:
    """Skip with an SGLang older than `version`, which lacks what `lacking` names."""
    return pytest.mark.skipif(not compat.at_least(version), reason=f"SGLang {compat.engine_version()} lacks {lacking}")


def served(feature: str) -> pytest.MarkDecorator:
    """Skip with an SGLang with which `feature` is refused before the start: all but those of `compat.COMPLETE`."""
    return pytest.mark.skipif(
        not compat.complete(), reason=f"refused before the start with SGLang {compat.engine_version()}: {feature}"
    )
