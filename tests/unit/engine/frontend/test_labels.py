"""Labels of metrics that clients give: which are left out, and how many there are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.frontend.reporting import labels


@pytest.mark.parametrize(("allowed", "kept"), [(None, {}), (["team"], {"team": "a"})])
def test_labels_that_metrics_do_not_have_are_left_out(allowed: list[str] | None, kept: dict[str, str]) -> None:
    request = SimpleNamespace(custom_labels={"team": "a", "model_name": "b"})
    labels.keep_allowed(request, allowed)
    assert request.custom_labels == kept


def test_a_label_is_no_book() -> None:
    with pytest.raises(ConfigError, match="the label team is a text of at most 1024 characters"):
        labels.keep_allowed(SimpleNamespace(custom_labels={"team": "a" * 1025}), ["team"])


def test_few_priorities_have_series_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "_known", set())
    many, first, rest = list(range(1000)), range(labels.PRIORITIES), 1000 - labels.PRIORITIES
    counts = labels.count(SimpleNamespace(by_priority={None: 1, **dict.fromkeys(many, 2)}))
    assert counts.by_priority == {None: 1 + 2 * rest, **dict.fromkeys(first, 2)}
    seen: list[int | None] = []
    manager, requests = SimpleNamespace(enable_priority_scheduling=True), [SimpleNamespace(priority=p) for p in many]
    for request in requests:
        labels.collect(lambda _, state: seen.append(state.obj.priority), manager, SimpleNamespace(obj=request))
    assert seen == [*first, *[None] * rest]
    assert [request.priority for request in requests] == many
