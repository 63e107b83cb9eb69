"""The checks that replace SGLang's own when the extra_buffer strategy runs on a CPU."""

import logging
from types import SimpleNamespace

import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine.cpu import extra_buffer


def view(**changes):
    settings = {
        "mamba_radix_cache_strategy": "extra_buffer",
        "disaggregation_mode": "null",
        "mamba_track_interval": 256,
        "speculative_num_draft_tokens": None,
        "page_size": 64,
        "chunked_prefill_size": 2048,
    }
    return SimpleNamespace(**{**settings, **changes})


def check(settings, *, supported=True, chunk_size=64):
    extra_buffer.check(settings, "SomeForCausalLM", supported, lambda: chunk_size)


@pytest.mark.parametrize("changes", [{}, {"page_size": 1}, {"page_size": None}, {"chunked_prefill_size": -1},
                                     {"chunked_prefill_size": None}, {"speculative_num_draft_tokens": 4}])  # fmt: skip
def test_what_works_is_accepted_in_silence(changes, caplog):
    check(view(**changes))
    assert caplog.records == []


@pytest.mark.parametrize(("changes", "message"), [
    ({"page_size": 48}, "--mamba-track-interval to a multiple of 48: 256$"),
    ({"mamba_track_interval": 3, "speculative_num_draft_tokens": 4}, "--mamba-track-interval to at least 4: 3$"),
    ({"mamba_radix_cache_strategy": "extra_buffer_lazy", "disaggregation_mode": "decode"},
     "use --mamba-radix-cache-strategy extra_buffer: --disaggregation-mode decode$"),
])  # fmt: skip
def test_what_cannot_work_names_the_remedy(changes, message):
    with pytest.raises(ConfigError, match=message):
        check(view(**changes))


def test_an_unsupported_model_is_sent_to_the_other_strategy():
    with pytest.raises(ConfigError, match=r"--mamba-radix-cache-strategy no_buffer: SomeForCausalLM$"):
        check(view(), supported=False)


def test_chunk_and_page_that_do_not_divide_each_other():
    def refuse():
        raise AssertionError("64 % 48")

    with pytest.raises(ConfigError, match=r"--page-size: 64$"):
        extra_buffer.check(view(), "SomeForCausalLM", True, refuse)


def test_prefill_chunks_too_short_for_a_checkpoint_are_warned_about(caplog):
    with caplog.at_level(logging.WARNING):
        check(view(chunked_prefill_size=32))
    assert "raise it to at least 64" in caplog.text


def test_the_platform_says_yes():
    assert extra_buffer.platform_supports_extra_buffer() is True
