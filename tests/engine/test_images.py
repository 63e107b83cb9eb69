"""Chats with images against a server: no image is taken for another, marks lie behind images, nothing hangs."""

from __future__ import annotations

import base64
import json
import random
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_hybrid.core.process import free_port
from sglang_hybrid.demo.server import Server
from tests.engine.pictures import Viewer, blocks, chat, image, plain, png, said, text, url
from tests.engine.prompts import HEAD, TREE
from tests.engine.support import Client

pytestmark = pytest.mark.engine

SCARCE = ("--max-mamba-cache-size", "40", "--max-total-tokens", "6000", "--chunked-prefill-size", "256")
SEGMENTS = ("--hybrid-segments", "on", "--hybrid-segment-memory-gb", "0.05")
LONG = "The keeper looks at the gate. " * 8
MARK = {"cache_control": {"type": "ephemeral"}}
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def viewers(models: Callable[[str], Path]) -> Callable[[str], Viewer]:
    return cache(lambda preset: Viewer(models(preset)))


@pytest.fixture
def viewer(viewers: Callable[[str], Viewer]) -> Viewer:
    return viewers("vision")


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that requests may read, with a way out of it."""
    folder: Path = tmp_path_factory.mktemp("gallery")
    (folder / "inside.png").write_bytes(blocks(1))
    (folder / "out.png").symlink_to("/etc/hostname")
    return folder


@pytest.fixture
def client(serve: Callable[..., Client], gallery: Path) -> Client:
    return serve("vision", *SCARCE, "--hybrid-media-folder", str(gallery), "--hybrid-max-megapixels", "2")


def asked(client: Client, messages: list[dict[str, Any]], **fields: Any) -> tuple[str, dict[str, Any]]:
    """The answer, and what it says of the cache."""
    answer = client.post("/v1/chat/completions", chat(messages, **fields))
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens_details"]


def test_turns_about_images_are_served_from_cache_and_right(client: Client, viewer: Viewer) -> None:
    client.flush()
    messages = [said(text(LONG), image(blocks(1, 256, 128)), text("What is it?"))]
    cached = []
    for more in ("And this?", "Are they alike?", "Why?"):
        answer, details = asked(client, messages)
        viewer.assert_greedy(messages, answer)
        cached.append(details["cached_tokens"])
        pictures = [image(blocks(len(messages), 64, 320))] if len(messages) == 1 else []
        messages += [{"role": "assistant", "content": answer}, said(*pictures, text(more))]
    assert cached[0] == 0 < 256 <= cached[1] < cached[2]


def test_what_stands_behind_an_image_belongs_to_it(client: Client, viewer: Viewer) -> None:
    client.flush()
    cached = []
    for seed in (1, 2, 1, 2):
        messages = [said(image(blocks(seed, 512, 128)), text(LONG))]
        answer, details = asked(client, messages)
        viewer.assert_greedy(messages, answer)
        cached.append(details["cached_tokens"])
    assert cached[:2] == [0, 0]
    assert min(cached[2:]) >= 128


def test_pages_of_one_colour_are_told_apart_by_their_shape(client: Client, viewer: Viewer) -> None:
    """Their patches are the same, so SGLang's hash of them is too; where the patches lie is not."""
    client.flush()
    shapes = [(256, 64), (64, 256), (128, 128)]
    for shape in [*shapes, *shapes]:
        assert_seen(client, viewer, [said(image(plain(*shape)), text(LONG))])


def test_new_weights_see_an_image_anew(models: Callable[[str], Path], tmp_path: Path) -> None:
    """Of an image that was seen before SGLang would go on with what the old encoder made of it."""
    before, after = models("vision"), tmp_path / "after"
    shutil.copytree(before, after)
    for path in after.glob("*.safetensors"):
        generator = torch.Generator().manual_seed(5)
        weights = {
            name: x + 0.1 * torch.randn(x.shape, generator=generator).to(x.dtype) if "visual" in name else x
            for name, x in load_file(path).items()
        }
        save_file(weights, path, metadata={"format": "pt"})
    messages = [said(image(blocks(1, 256, 128)), text(LONG))]
    with Server(before, SCARCE, log=tmp_path / "server.log") as server:
        server.wait_ready()
        client = Client(server)
        for folder in (before, after, before):
            assert client.post("/update_weights_from_disk", {"model_path": str(folder)})["success"]
            assert_seen(client, Viewer(folder), messages)


def assert_seen(client: Client, viewer: Viewer, messages: list[dict[str, Any]]) -> None:
    """What the server says of `messages` has the log-probabilities of `viewer`."""
    (choice,) = client.post("/v1/chat/completions", chat(messages, logprobs=True, top_logprobs=1))["choices"]
    chances, output = viewer.chances(messages, choice["message"]["content"])
    for row, (token, each) in enumerate(zip(output, choice["logprobs"]["content"], strict=True)):
        assert each["logprob"] == pytest.approx(chances[row, token].item(), abs=1e-3)


def test_pages_with_images_have_names(serve: Callable[..., Client]) -> None:
    """For events; from SGLang 0.5.23 on an image is a number of more than 32 bits in them."""
    events = {"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{free_port()}", "topic": "kv"}
    told = ("--hybrid-state-events", "published", "--kv-events-config", json.dumps(events))
    client = serve("vision", *SCARCE, "--page-size", "64", *told)
    messages = [said(image(blocks(1, 512, 128)), text(LONG))]
    assert [asked(client, messages)[1]["cached_tokens"] >= 256 for _ in range(2)] == [False, True]


def bodies(kind: str, turn: int) -> tuple[str, dict[str, Any]]:
    """Requests that share all up to a mark."""
    first, mine = blocks(7, 512, 128), text(f"{turn} and more")
    if kind == "behind text":
        return "/v1/chat/completions", chat([said(text(LONG, **MARK), image(blocks(turn)), mine)])
    if kind == "behind text behind an image":
        return "/v1/chat/completions", chat([said(image(first), text(LONG, **MARK), image(blocks(turn)), mine)])
    if kind == "the request":
        ends = [{"role": "assistant", "content": f"{turn}"}, said(text("Yes?"))] if turn else []
        return "/v1/chat/completions", chat([said(text("Look."), image(first)), *ends], **MARK)
    if kind == "anthropic":
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(first).decode()}
        parts = [{"type": "image", "source": source, **MARK}, mine]
        return "/v1/messages", {"model": "m", "max_tokens": 4, "messages": [said(*parts)]}
    return "/v1/chat/completions", chat([said(image(first, **MARK), mine)])


@pytest.mark.parametrize(
    "kind", ["on the image", "behind text", "behind text behind an image", "the request", "anthropic"]
)
def test_a_mark_has_its_place_among_images(client: Client, kind: str) -> None:
    """Without it the second request would only show where the first one could have been shared."""
    client.flush()
    usages = [client.post(*bodies(kind, turn))["usage"] for turn in (0, 1)]
    told = [usage.get("prompt_tokens_details", {}).get("cached_tokens", 0) for usage in usages]
    told = [each or usage.get("cache_read_input_tokens", 0) for each, usage in zip(told, usages, strict=True)]
    assert told[0] == 0 < 64 <= told[1]


def sent(picture: Any, prompt: str = f"{PLACE}what", **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/generate", {"text": prompt, "image_data": picture, "sampling_params": {"max_new_tokens": 2}, **fields}


def shown(address: str) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", chat([said({"type": "image_url", "image_url": {"url": address}})])


PICTURE = url(blocks(1))
IDS = {"text": None, "input_ids": [259, *[261] * 3, 260, 5]}
REFUSED = {
    "more places in the text than images": sent(PICTURE, PLACE * 2),
    "more places in the tokens": sent(PICTURE, **IDS),
    "the model's own tokens in a text": (
        "/v1/chat/completions",
        chat([said(text("<|image_pad|>" * 30), image(blocks(1)))]),
    ),
    "an id below the vocabulary beside an image": sent(PICTURE, text=None, input_ids=[259, 261, 260, -5]),
    "an id that no integer holds": sent(PICTURE, text=None, input_ids=[259, 261, 260, 2**70]),
    "an endless file": shown("file:///dev/zero"),
    "a path": sent("/etc/hostname"),
    "a path of a video": ("/generate", {"text": "a", "video_data": "/etc/hostname"}),
    "another image's name": sent(PICTURE, mm_hashes=["07"]),
    "what a processor made": sent(
        {"format": "processor_output", "pixel_values": [[0.0]], "image_grid_thw": [[1, 2, 2]]}
    ),
    "no image": sent(url(b"hello")),
    "nothing": sent(""),
    "too many pixels": shown(url(png(np.zeros((1000, 2100), dtype=np.uint8)))),
    "a thread": shown(url(png(np.zeros((2, 1000), dtype=np.uint8)))),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_an_image_is_the_clients_mistake(client: Client, what: str) -> None:
    """Three of these hang in SGLang for ever, one ends it, one gives other clients a wrong answer, four are a 500."""
    path, body = REFUSED[what]
    status, answer = client.answer(path, body, timeout=60)
    assert status == 400, answer
    assert client.answer(*sent(PICTURE))[0] == 200


def test_files_are_read_below_the_folder_alone(client: Client, gallery: Path) -> None:
    inside = client.answer(*shown(f"file://{gallery}/inside.png"))
    assert inside[0] == 200, inside[1]
    for path in (f"{gallery}/out.png", f"{gallery}/../inside.png", str(gallery), f"{gallery}/absent.png"):
        status, answer = client.answer(*shown(f"file://{path}"))
        assert (status, "--hybrid-media-folder" in answer) == (400, True), answer


def test_base64_of_a_jpeg_is_no_path(client: Client) -> None:
    """It begins with /9j/."""
    from io import BytesIO

    from PIL import Image

    file = BytesIO()
    Image.open(BytesIO(blocks(1))).save(file, "JPEG")
    assert client.answer(*sent(base64.b64encode(file.getvalue()).decode()))[0] == 200


def conversation(rng: random.Random) -> list[dict[str, Any]]:
    start = [{"role": "system", "content": "You see. " * rng.choice([5, 20, 40])}] if rng.random() < 0.7 else []
    parts = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        if rng.random() < 0.6:
            parts.append(text(rng.choice(["look at this ", "and compare: " * 5, "word " * 40])))
        parts.append(image(blocks(rng.randrange(4), rng.choice([64, 128, 256]), rng.choice([64, 128, 320]))))
        if rng.random() < 0.3:
            parts[-1].update(MARK)
    return [*start, said(*parts, text("why?"))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "flags"),
    [
        pytest.param("vision", SCARCE, id="scarce"),
        pytest.param("vision", (*SCARCE, "--hybrid-cpu-event-loop", "overlap"), id="overlap"),
        pytest.param("vision", (*SCARCE, "--mamba-radix-cache-strategy", "no_buffer"), id="no_buffer"),
        pytest.param("vision", (*SCARCE, "--page-size", "64"), id="pages"),
        pytest.param("vision", (*SCARCE, "--enable-hierarchical-cache", "--hicache-ratio", "2"), id="host tier"),
        pytest.param("vision", (*SCARCE, "--tokenizer-worker-num", "2"), id="workers"),
        pytest.param("vision", ("--hybrid-memory", "elastic", "--hybrid-cpu-memory-gb", "0.02"), id="elastic"),
        pytest.param("vision", (*SCARCE, *SEGMENTS), id="segments"),
        pytest.param("vision-mtp", (*SCARCE, *HEAD, "--hybrid-cpu-event-loop", "overlap"), id="head"),
        pytest.param("vision-mtp", (*SCARCE, *HEAD, *TREE), id="head, tree"),
    ],
)
def test_many_at_once_are_right(
    serve: Callable[..., Client], viewers: Callable[[str], Viewer], preset: str, flags: tuple[str, ...]
) -> None:
    client, viewer, until = serve(preset, *flags), viewers(preset), time.monotonic() + 20
    judged: list[tuple[list[dict[str, Any]], str]] = []

    def hold(seed: int) -> None:
        rng, messages = random.Random(seed), []
        for _ in range(rng.choice([1, 2, 3, 4])):
            if time.monotonic() > until:
                return
            messages += conversation(random.Random(rng.randrange(12)))[bool(messages) * -1 :]
            answer, _ = asked(client, messages, tokens=rng.choice([4, 12, 40]))
            judged.append((list(messages), answer))
            messages.append({"role": "assistant", "content": answer})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(hold, range(60)))
    assert len(judged) >= 40
    for messages, answer in random.Random(0).sample(judged, 40):
        viewer.assert_greedy(messages, answer)


@pytest.mark.slow
def test_images_beside_composed_prompts_while_a_head_drafts(
    serve: Callable[..., Client], viewers: Callable[[str], Viewer]
) -> None:
    """A batch of both is a shorter stream than SGLang's, by whose lengths it would cut the embeddings of images."""
    client, viewer = serve("vision-mtp", *HEAD, *SEGMENTS), viewers("vision-mtp")
    rng = random.Random(4)
    documents = [[rng.randrange(20, 200) for _ in range(count)] for count in (80, 120, 200)]

    def compose(number: int) -> int:
        ids, marks = [number] * 20, list[list[int]]()
        for each in rng.sample(documents, 2):
            marks.append([len(ids), len(ids) + len(each)])
            ids = [*ids, *each, 30, 31]
        sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True, "custom_params": {"segments": marks}}
        answer = client.post("/generate", {"input_ids": ids, "sampling_params": sampling})
        return int(answer["meta_info"]["cached_tokens_details"]["segment_tokens"])

    with ThreadPoolExecutor(8) as pool:
        talks = [conversation(random.Random(seed)) for seed in range(24)]
        both = [(pool.submit(asked, client, each), pool.submit(compose, 20 + n)) for n, each in enumerate(talks)]
    assert sum(reused.result() for _, reused in both) > 1000
    for messages, (answer, _) in zip(talks, both, strict=True):
        viewer.assert_greedy(messages, answer.result()[0])
