import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.memory.layout import Layout, Planes, first_planes

MIB = 1 << 20
KV = Planes("kv", 24, 1024)  # Qwen3-Next TP1: 12 attention layers, K and V, 2 heads x 256 x bf16
STATE = Planes("temporal", 36, 2 * MIB)  # 36 GDN layers, 32 x 128 x 128 x fp32


def test_qwen3_next_columns():
    kv = Layout("kv", (KV,), slots=1 << 20, page_slots=64)
    state = Layout("state", (STATE,), slots=100)
    assert (kv.column_slots, kv.column_granules, kv.column_pages, kv.exclusive) == (2048, 24, 32, True)
    assert (state.column_slots, state.column_granules, state.exclusive) == (1, 36, True)
    assert first_planes([kv, state]) == (0, 24)
    assert kv.plane_granules == (512,) * 24


def test_small_planes_share_granules_between_columns():
    layout = Layout("state", (STATE, Planes("conv", 36, 64 << 10)), slots=64)
    assert layout.column_slots == 1
    assert not layout.exclusive
    assert layout.span(layout.planes[1], 31) == (0, 1)
    assert layout.span(layout.planes[1], 32) == (1, 2)
    assert layout.column_granules == 72
    assert layout.plane_granules == (64,) * 36 + (2,) * 36


@pytest.mark.parametrize(("dtype_bytes", "slots"), [(1, 4096), (2, 2048), (4, 1024)])
def test_any_dtype(dtype_bytes, slots):
    assert Layout("kv", (Planes("kv", 2, 512 * dtype_bytes),), slots=8192).column_slots == slots


def test_pages_that_do_not_fill_a_granule_leave_columns_sharing():
    layout = Layout("kv", (KV,), slots=3 * 4000, page_slots=3)
    assert layout.column_slots == 2046
    assert not layout.exclusive
    assert layout.span(KV, 1) == (0, 2)


def test_a_slot_larger_than_a_granule_is_a_column_of_several():
    layout = Layout("state", (Planes("state", 2, 6 * MIB),), slots=4)
    assert (layout.column_slots, layout.column_granules, layout.exclusive) == (1, 6, True)


def test_a_column_of_small_slots_may_take_several_granules_of_a_plane():
    """Latents of Kimi-Linear: 1,152 bytes, of which 18 MiB hold whole ones."""
    latent = Planes("kv", 7, 1152)
    with pytest.raises(ConfigError, match="cross the boundaries"):
        Layout("kv", (latent,), slots=64)
    layout = Layout("kv", (latent,), slots=3 * 16384, page_slots=64, run=9)
    assert (layout.column_slots, layout.column_granules, layout.exclusive) == (16384, 63, True)
    assert (layout.columns, layout.column_pages, layout.plane_granules) == (3, 256, (27,) * 7)
    assert layout.span(latent, 2) == (18, 27)


def test_slots_that_cross_granules_are_refused_with_the_remedy():
    planes = Planes("conv", 36, 48 << 10)
    with pytest.raises(ConfigError, match=r"pad the slot to 65536 bytes.*straddle=True: 49152"):
        Layout("state", (planes,), slots=64)
    allowed = Layout("state", (planes,), slots=64, straddle=True)
    assert allowed.span(planes, 0) == (0, 1)
    assert allowed.column_slots == 42
    assert allowed.span(planes, 1) == (0, 2)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Layout("kv", (), slots=4),
        lambda: Layout("kv", (KV,), slots=0),
        lambda: Layout("kv", (KV,), slots=65, page_slots=64),
        lambda: Layout("kv", (KV,), slots=64, granule_bytes=0),
        lambda: Layout("kv", (KV,), slots=64, pinned_pages=99999),
        lambda: Planes("kv", 0, 1024),
    ],
)
def test_bad_layouts_are_config_errors(bad):
    with pytest.raises(ConfigError):
        bad()
