"""New weights are the target's: a draft that was loaded from a folder of its own keeps those it has.

SGLang gives what it loads to everything that drafts. That is right for the model's own head. A dense draft lacks half
of the names, which ends the scheduler, or comes back as a failure behind which the cache of the old weights stays; one
of EAGLE-3 takes layers and a head of the same names. Runs in the scheduler.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

from sglang_hybrid.engine import compat

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def draft_spared(updater: Any, message: Any) -> Iterator[None]:
    """While a call loads weights there is no such draft, unless `selector` names it: who does that means it."""
    draft = updater.draft_worker
    if getattr(message, "selector", "all") == "all" and (folder := _folder_of_its_own(updater)):
        logger.info("what drafts keeps its weights, which are not the model's: %s", folder)
        updater.draft_worker = None
    try:
        yield
    finally:
        updater.draft_worker = draft


def spare_draft(original: Callable[..., Any], updater: Any, message: Any) -> Any:
    """AROUND hook of update_weights_from_distributed and update_weights_from_ipc."""
    with draft_spared(updater, message):
        return original(updater, message)


def _folder_of_its_own(updater: Any) -> str:
    """Where the weights of what drafts are, if not where the model's are. A head follows the model to a new folder."""
    target = updater.tp_worker.model_runner.model_config.model_path
    folders = (runner.model_config.model_path for runner in compat.draft_runners(updater.draft_worker))
    return next((str(folder) for folder in folders if os.path.realpath(folder) != os.path.realpath(target)), "")
