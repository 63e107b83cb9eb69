"""Images of a request: where they may come from, what stands for them in a prompt, where marks lie behind them."""

from __future__ import annotations

import asyncio
import base64
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hybrid.core.config import HybridConfig
from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.engine import compat
from sglang_hybrid.engine.cache import boundaries, media
from sglang_hybrid.engine.cache.media import Numbers
from sglang_hybrid.engine.frontend.marks.placeholders import Placed, expanded, place, remember
from sglang_hybrid.engine.frontend.tokenization import processing
from sglang_hybrid.engine.frontend.validation import media as sources
from tests.engine.pictures import blocks, url

KINDS = ("image_data", "video_data", "audio_data")


def request(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**dict.fromkeys((*KINDS, "input_ids", "mm_hashes")), **fields})


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Any:
    def configure(**settings: Any) -> None:
        monkeypatch.setattr(sources, "settings", lambda: HybridConfig(**settings))

    configure()
    return configure


def check(obj: Any, trusts_hashes: bool = False) -> Any:
    sources.require_sources(obj, 320, trusts_hashes)
    return obj


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        *[(kind, path) for kind in KINDS for path in ("/dev/zero", "file:///dev/zero", "/etc/hostname", "")],
        ("image_data", "video:/dev/zero"),
        ("image_data", SimpleNamespace(url="file:///etc/hostname")),
        ("image_data", [["https://a.example/a.png"], ["file:///etc/hostname"]]),
        ("audio_data", "../secret.wav"),
        ("video_data", "clip.mp4"),
    ],
)
def test_files_of_the_server_are_not_read(configured: Any, kind: str, source: Any) -> None:
    with pytest.raises(ConfigError, match="--hybrid-media-folder only"):
        check(request(**{kind: source}))


def test_files_below_the_folder_are(configured: Any, tmp_path: Path) -> None:
    folder, file = tmp_path / "folder", tmp_path / "folder" / "deep" / "a b.png"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x")
    (tmp_path / "folder-beside").mkdir()
    (tmp_path / "folder-beside" / "c.png").write_bytes(b"x")
    (folder / "out.png").symlink_to(tmp_path / "folder-beside" / "c.png")
    configured(media_folder=str(folder))
    for kind in KINDS:
        for good in (str(file), f"file://{folder}/deep/a%20b.png"):
            assert getattr(check(request(**{kind: good})), kind) == good
        for bad in (folder / "out.png", folder / ".." / "folder-beside" / "c.png", folder, folder / "none.png"):
            with pytest.raises(ConfigError, match=f"below {folder}"):
                check(request(**{kind: str(bad)}))


def test_what_is_no_file_passes_as_it_is(configured: Any) -> None:
    for source in ("https://a.example/a.png", "http://a.example", url(blocks(1)), {"a": 1}, 5):
        assert check(request(image_data=[source, None])).image_data == [source, None]


def test_base64_is_taken_for_no_path(configured: Any) -> None:
    plain = base64.b64encode(bytes(range(256)) * 4).decode()
    jpeg = "/9j/" + plain  # a path to SGLang
    obj = check(request(image_data=[[plain], [SimpleNamespace(url=jpeg)]], video_data=plain))
    assert obj.image_data[0] == [f"data:;base64,{plain}"]
    assert (obj.image_data[1][0].url, obj.video_data) == (f"data:;base64,{jpeg}", f"data:;base64,{plain}")


def test_the_pixels_of_a_request_are_bounded(configured: Any) -> None:
    configured(max_megapixels=0.05)
    three = [url(blocks(seed, 128, 128)) for seed in range(3)]
    check(request(image_data=three))
    with pytest.raises(ConfigError, match=r"0\.05 million pixels \(--hybrid-max-megapixels\).*0\.1 million"):
        check(request(image_data=[*three, SimpleNamespace(url=url(blocks(4, 256, 128)))]))
    check(request(image_data=["data:image/png;base64,no image", "data:", url(b"no image either")]))


def test_nobody_says_which_image_an_image_is(configured: Any) -> None:
    named = request(image_data=["https://a.example/a.png"], mm_hashes=["07"])
    with pytest.raises(ConfigError, match="--trust-mm-content-hashes"):
        check(named)
    check(named, trusts_hashes=True)
    with pytest.raises(ConfigError, match=r"tensors.*format 'processor_output'"):
        check(request(image_data={"format": "processor_output", "hash": 7, "pad_value": 1_000_007}))


@pytest.mark.parametrize("ids", [[-1], [5, 320], [[5], [2**70]]])
def test_ids_beside_images_are_those_of_the_vocabulary(configured: Any, ids: list[Any]) -> None:
    with pytest.raises(ConfigError, match="0 to 319"):
        check(request(image_data=["https://a.example/a.png"], input_ids=ids))
    assert not sources.given(request(input_ids=ids)), "without images they are checked as a prompt"


def test_lists_in_lists_have_an_end(configured: Any) -> None:
    deep: Any = url(blocks(1))
    for _ in range(5_000):
        deep = [deep]
    with pytest.raises(ConfigError, match="image_data is nested at most 64 levels deep"):
        check(request(image_data=deep))


def test_no_text_takes_long_to_be_told_from_base64(configured: Any) -> None:
    """With a pattern that tries again from every place, this would take days."""
    with pytest.raises(ConfigError, match="--hybrid-media-folder"):
        check(request(image_data="a" + " " * 10**6 + "!"))


@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 3).map(lambda high: 7 + high * 2**30), max_size=60))
def test_no_two_hashes_have_one_number(hashes: list[int]) -> None:
    numbers, given_ = Numbers(1_000_000), {}
    for hash_ in hashes:
        number = numbers.of(hash_)
        assert 1_000_000 <= number < 1_000_000 + 2**30
        assert given_.setdefault(number, hash_) == hash_
        assert numbers.of(hash_) == number


def test_numbers_are_remembered_in_the_order_of_their_use() -> None:
    numbers = Numbers(0, most=2)
    assert [numbers.of(hash_) for hash_ in (1, 2, 1, 3)] == [1, 2, 1, 3]
    assert numbers.of(1 + 2**30) == 2, "of 2, which was asked for longest ago, nothing is left"
    assert len(numbers) == 2


def items(*hashes: int) -> Any:
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput

    made = [MultimodalDataItem(modality=Modality.IMAGE, hash=hash_, offsets=[(0, 3)]) for hash_ in hashes]
    return MultimodalProcessorOutput(input_ids=[5] * 4, mm_items=made, padded_input_ids=[7] * 4)


def test_two_images_with_one_number_in_sglang_get_two(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.schedule_batch import MultimodalInputs

    monkeypatch.setattr(media, "_numbers", None)
    found = []
    for hash_ in (5, 5 + 2**30, 5):
        result = MultimodalInputs.from_processor_output(items(hash_))
        media.tell_apart(result)
        found.append((result.mm_items[0].pad_value, result.padded_input_ids))
    assert found[0] == found[2] != found[1]
    if not getattr(result.mm_items[0], "pad_values", None):  # newer ones have 62 bits each
        assert found[:2] == [(1_000_005, [7] * 4), (1_000_006, None)]


def test_one_hash_of_patches_becomes_one_of_the_image() -> None:
    import torch
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

    original = MultimodalDataItem.set_pad_value
    while hasattr(original, "__wrapped__"):  # a server in this process hooks it
        original = original.__wrapped__

    def hashed(grid: Any, modality: Any = Modality.IMAGE, **more: Any) -> int:
        item = MultimodalDataItem(modality=modality, feature=torch.ones(8, 4))
        item.set("image_grid_thw", grid)
        for name, value in more.items():
            item.set(name, value)
        media.identify(original, item)
        low = item.pad_value
        media.identify(original, item)
        assert item.pad_value == low, "it has a number already"
        return int(item.hash)

    wide = hashed(torch.tensor([[1, 2, 4]]))
    assert wide == hashed(torch.tensor([[1, 2, 4]]))
    others = [
        hashed(torch.tensor([[1, 4, 2]])),
        hashed(torch.tensor([[1, 2, 4]]), Modality.VIDEO),
        hashed(torch.tensor([[1, 2, 4]]), second_per_grid_ts=0.5),
        hashed(torch.tensor([[1, 2, 4]]), sizes=[(1, 2)]),
    ]
    assert len({wide, *others}) == 5
    kept = MultimodalDataItem(modality=Modality.IMAGE, hash=7)
    media.identify(original, kept)
    assert kept.hash == 7, "who set it knows which image it is"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=30))
def test_marks_move_with_the_tokens_of_images(runs: list[tuple[int, int]]) -> None:
    """Token 9 is an image's; between two of them stands something."""
    before: list[int] = []
    after: list[int] = []
    ends = [0]
    for token, count in runs:
        for each, times in ((token, 1), (9, count)):
            before.append(each)
            after += [each] * times
            ends.append(len(after))
    positions = tuple(range(1, len(before) + 1))
    assert expanded(Placed(positions, before), after) == ends[1:]
    video, where = [7, 9, 8], len(before)
    times = [7, 1, 2, 9, 9, 8, 7, 3, 4, 9, 9, 8]
    around = Placed((*positions, where + 2, *(where + 3 + each for each in positions)), [*before, *video, *before])
    behind = [len(after) + len(times) + each for each in ends[1:]]
    assert expanded(around, [*after, *times, *after])[: len(positions)] == ends[1:]
    assert expanded(around, [*after, *times, *after])[-len(positions) :] == behind


def test_a_mark_gets_its_place_once_for_every_sample() -> None:
    params: dict[str, Any] = {boundaries.KEY: [1]}
    remember(params, [3], [5, 9, 6, 7])
    sampling = {"custom_params": params}
    for _ in range(2):
        obj = SimpleNamespace(sampling_params=sampling)
        place(obj, [5, 9, 9, 9, 6, 7])
        assert obj.sampling_params["custom_params"] == {boundaries.KEY: [1, 5]}
    lost = SimpleNamespace(sampling_params=sampling)
    place(lost, [5, 8, 8, 8])
    assert lost.sampling_params["custom_params"] == {boundaries.KEY: [1], boundaries.LOST: 1}
    forged = {"custom_params": {"cache_boundaries_before_images": [[1], [2]]}}
    client = SimpleNamespace(sampling_params=forged)
    place(client, [1, 2])
    assert client.sampling_params is forged


class Processed:
    def __init__(self, error: BaseException, with_image: bool = True) -> None:
        self.error, self.with_image = error, with_image

    def contains_mm_input(self) -> bool:
        return self.with_image


async def fails(_: Any, obj: Processed) -> None:
    raise obj.error


def raised(error: BaseException, cause: BaseException | None = None, **options: Any) -> BaseException:
    error.__context__ = cause
    with pytest.raises(BaseException) as found:  # noqa: PT011
        asyncio.run(processing.tokenize(fails, None, Processed(error, **options)))
    return found.value


def test_what_a_processor_cannot_use_is_a_mistake_of_the_client() -> None:
    for error in (RuntimeError("sizes"), TypeError("x"), KeyError("y"), OverflowError("z"), AssertionError()):
        assert isinstance(raised(error), ConfigError)
    value = ValueError("as it is")
    assert raised(value) is value
    for error, options in (
        (RuntimeError("no package"), {"cause": ImportError("decord")}),
        (MemoryError(), {}),
        (TypeError("text alone"), {"with_image": False}),
        (asyncio.CancelledError(), {}),
    ):
        assert type(raised(error, **options)) is type(error)


def test_a_processor_that_runs_out_of_images_does_not_hang() -> None:
    def runs_out(_: Any, iterator: Any) -> Any:
        return next(iterator)

    async def served() -> Any:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as pool:
            return await asyncio.wait_for(loop.run_in_executor(pool, processing.run, runs_out, None, iter(())), 30)

    with pytest.raises(ConfigError, match="more places"):
        asyncio.run(served())


def test_new_weights_encode_images_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang flushes what they serve of KV and states, and keeps what the old encoder made of an image."""
    kept = {5: "an embedding"}
    monkeypatch.setattr(compat, "image_embeddings", lambda: kept)
    media.weights_change()
    assert not kept
    monkeypatch.setattr(compat, "image_embeddings", lambda: None)  # no cache is built yet
    media.weights_change()


def test_where_sglang_keeps_what_images_became() -> None:
    cache = compat.image_embeddings()
    assert cache is None or callable(cache.clear)
