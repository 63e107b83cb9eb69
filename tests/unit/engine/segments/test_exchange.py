"""Entries on their way from one scheduler to another: the same bytes arrive, or nothing does."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_hybrid.device.host import HostDriver
from sglang_hybrid.engine.frontend.segments.files import Files
from sglang_hybrid.engine.segments import room
from sglang_hybrid.engine.segments.exchange import Exchange
from sglang_hybrid.engine.segments.parcels import HEAD_BYTES
from sglang_hybrid.engine.segments.store import Shapes, Store
from sglang_hybrid.engine.segments.weights import digest
from sglang_hybrid.segment.geometry import Seams
from sglang_hybrid.segment.keys import Identity
from tests.unit.engine.pools.arenas import opened
from tests.unit.engine.segments.exchanging import CPU, IDS, SHAPES, TOKENS, Composer, exchange, model, static


def sent(one: Exchange, other: Exchange, ids: list[int] = IDS, **changed: Any) -> dict[str, Any]:
    """What the second says of the first one's entry of `ids`."""
    files = Files(1)
    form = other.form.hex()
    packed = one.answer(None, {"pack": ids, "form": form, "into": files.told})
    if "why" in packed:
        return packed
    assert os.stat(files.told["paths"][0]).st_size == packed["bytes"]
    question = {"unpack": ids, "form": form, "from": files.told, "tokens": packed["tokens"], "kept": packed["kept"]}
    return other.answer(None, question | {"made": True} | changed)


KINDS = [
    pytest.param(
        replace(SHAPES, dense=dense, head_layers=head), dtype, id=f"{'gdn' if dense else 'mamba2'}-{dtype}-{head}"
    )
    for dense in (True, False)
    for dtype in ("float32", "bfloat16", "int8")
    for head in (0, 1)
]


@pytest.mark.parametrize(("shapes", "dtype"), KINDS)
@pytest.mark.parametrize("stays", [1, 3])
def test_what_arrives_is_what_was_sent(shapes: Shapes, dtype: str, stays: int) -> None:
    here, there = static(shapes, dtype), static(shapes, dtype)
    there.make([7, *IDS], 2, seed=9)  # so that blocks and slots have other numbers
    entry = here.make(IDS, stays)
    assert sent(exchange(here), exchange(there)) == {}
    arrived = there.index.find(there.identity.key(array("q", IDS)))
    assert arrived is not None
    assert there.read(arrived) == here.read(entry)
    assert (arrived.making, arrived.owed, arrived.pins, arrived.tokens) == (False, "segment_cold", 0, TOKENS)
    assert arrived.transitions.size == entry.transitions.size
    assert (here.index.counts.handed_out, there.index.counts.fetched, there.index.counts.made) == (1, 1, 0)
    here.index.check()
    there.index.check()


def test_blocks_of_an_elastic_budget_take_what_a_buffer_sends() -> None:
    arena, driver = opened(HostDriver, lambda: 0.0)
    budget = arena.sizing.total * arena.sizing.granule_bytes
    elastic = Composer(Store(SHAPES, "int8", 0, CPU, lambda needs: room.shared(arena, budget, needs)))
    here = static(SHAPES, "int8")
    entry = here.make(IDS, 2)
    one, other = exchange(here), exchange(elastic)
    other._form = one.form  # they differ in the bytes of a block alone
    assert sent(one, other) == {}
    arrived = elastic.index.find(elastic.identity.key(array("q", IDS)))
    assert arrived is not None
    assert elastic.read(arrived) == here.read(entry)
    back = static(SHAPES, "int8")
    third = exchange(back)
    third._form = one.form
    assert sent(other, third) == {}
    elastic.index.check()
    elastic.index.clear()
    arena.check()
    arena.pooled.close()
    driver.close()


def test_form_is_of_model_weights_and_layout_and_not_of_a_path() -> None:
    one, other = static(), static()
    other.identity = Identity("elsewhere", 8, 8)
    assert exchange(one).form == exchange(other).form
    assert exchange(one, model(1)).form != exchange(one).form
    assert exchange(static(dtype="bfloat16")).form != exchange(one).form
    assert exchange(static(replace(SHAPES, head_layers=1))).form != exchange(one).form
    other.seams = Seams(9, 3)
    assert exchange(other).form != exchange(one).form


def test_form_is_of_what_the_model_computes_by() -> None:
    def of(**config: Any) -> bytes:
        net = model()
        net.config = SimpleNamespace(to_dict=lambda: {"_name_or_path": "a", "rope": {"theta": 1e4}, **config})  # type: ignore[assignment]
        return exchange(static(), net).form

    assert of() == of(_name_or_path="b", transformers_version="9") != exchange(static()).form
    assert of() != of(rope={"theta": 2e4})
    assert of(eps=1e-5) != of(eps=1e-6)
    assert of(kind=CPU, none=None, list=[1, (2,)]) == of(kind=CPU, none=None, list=[1, (2,)])


def test_a_digest_sees_every_weight() -> None:
    net = model()
    before = digest(net)
    assert digest(model()) == before
    for parameter in net.parameters():
        flat = parameter.data.view(-1)
        for at in range(flat.numel()):
            old = flat[at].clone()
            flat[at] += 1
            assert digest(net) != before, (parameter.shape, at)
            flat[at] = old
    assert digest(net) == before


def test_nothing_goes_between_servers_that_differ() -> None:
    here, there = static(), static()
    here.make(IDS, 2)
    said = sent(exchange(here), exchange(there, model(1)))
    assert "the servers differ in model, weights, release or settings of segments" in said["why"]
    assert len(there.index) == 0


def test_what_was_made_with_other_weights_is_not_handed_out() -> None:
    here, there = static(), static()
    here.make(IDS, 2)
    net = model()
    one, other = exchange(here, net), exchange(there)
    one.outdated()  # an update that leaves the weights as they were, and the cache
    assert sent(one, other) == {"why": "it was made with other weights"}
    again = [5, *IDS[1:]]
    here.make(again, 2)
    assert sent(one, other, again) == {}
    next(iter(net.parameters())).data += 1
    one.outdated()
    there.index.clear()
    here.index.clear()
    here.make(again, 2)
    assert "differ" in sent(one, other, again)["why"]


@pytest.mark.parametrize(
    "changed",
    [
        {"tokens": TOKENS + 1},
        {"kept": 5},
        {"kept": -1},
        {"kept": 13},
        {"from": {"paths": ["/nowhere"], "token": ""}},
        {"unpack": [*IDS, 1]},
    ],
)
def test_what_is_no_entry_is_refused_and_leaves_nothing(changed: dict[str, Any]) -> None:
    here, there = static(), static()
    here.make(IDS, 2)
    assert sent(exchange(here), exchange(there), **changed) == {"why": "what came is no entry of this segment"}
    assert len(there.index) == 0
    assert not there.store.blocks.taken
    there.index.check()


def of(path: Path) -> dict[str, Any]:
    return {"paths": [str(path)], "token": ""}


def test_no_other_file_is_written_or_read(tmp_path: Path) -> None:
    here, there = static(), static()
    here.make(IDS, 2)
    one, file = exchange(here), tmp_path / "file"
    file.write_bytes(b"of somebody else")
    said = one.answer(None, {"pack": IDS, "form": one.form.hex(), "into": of(file)})
    assert (said, file.read_bytes()) == ({"why": "there is no memory to send it from"}, b"of somebody else")
    link = tmp_path / "link"
    link.symlink_to(file)
    assert "why" in one.answer(None, {"pack": IDS, "form": one.form.hex(), "into": of(link)})
    assert "why" in sent(one, exchange(there), **{"from": of(file)})


def test_an_entry_that_is_not_there_and_one_that_is() -> None:
    here, there = static(), static()
    assert sent(exchange(here), exchange(there)) == {"why": "it is not there"}
    here.make(IDS, 2)
    there.make(IDS, 3, seed=4)
    (kept,) = there.index
    before = there.read(kept)
    assert sent(exchange(here), exchange(there)) == {}
    assert there.read(kept) == before, "what is there stays"


def test_what_finds_no_room_is_not_kept() -> None:
    here, there = static(), static()
    here.make(IDS, 2)
    held = [there.make([number, *IDS[1:]], 1, seed=number) for number in range(2)]
    for entry in held:
        there.index.pin(entry)
    while there.store.blocks.free:
        there.store.blocks.take_state()
    said = sent(exchange(here), exchange(there))
    assert said == {"why": "it is worth less than all that is kept"}
    assert [entry.alive for entry in held] == [True, True]


class Ranks:
    """Threads that are ranks of one server."""

    def __init__(self, count: int) -> None:
        self._count, self._barrier, self._said = count, Barrier(count, timeout=60), dict[int, Any]()

    def member(self, rank: int) -> Any:
        def together(value: Any) -> list[Any]:
            self._said[rank] = value
            self._barrier.wait()
            found = [self._said[each] for each in range(self._count)]
            self._barrier.wait()
            return found

        return SimpleNamespace(
            place=(rank, self._count), gathered=together, least=lambda value: min(together(value)), most=list
        )


def test_ranks_send_and_keep_their_shares_or_none_does() -> None:
    here, there = [static() for _ in range(2)], [static() for _ in range(2)]
    for seed, composer in enumerate(here):
        composer.make(IDS, 2, seed)

    def all_ranks(do: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(do, range(2)))

    ones, others = ([exchange(side[rank], model(rank), meeting.member(rank)) for rank in range(2)]
                    for side, meeting in ((here, Ranks(2)), (there, Ranks(2))))  # fmt: skip
    forms = {form.hex() for form in all_ranks(lambda rank: ones[rank].form)}
    assert forms == {form.hex() for form in all_ranks(lambda rank: others[rank].form)}
    (form,) = forms
    files = Files(2)
    packed = all_ranks(lambda rank: ones[rank].answer(None, {"pack": IDS, "form": form, "into": files.told}))
    assert packed[0] == packed[1]
    question = {"unpack": IDS, "form": form, "tokens": TOKENS, "kept": packed[0]["kept"], "made": False}
    torn = {**question, "from": {**files.told, "paths": [files.told["paths"][0], "/nowhere"]}}
    assert all("why" in said for said in all_ranks(lambda rank: others[rank].answer(None, torn)))
    assert [len(composer.index) for composer in there] == [0, 0]
    whole = {**question, "from": files.told}
    assert all_ranks(lambda rank: others[rank].answer(None, whole)) == [{}, {}]
    for one, other in zip(here, there, strict=True):
        (left,), (right,) = one.index, other.index
        assert one.read(left) == other.read(right)
        assert right.owed == "", "it was there, so it is a hit"


def test_files_are_gone_with_whoever_holds_them() -> None:
    files = Files(2)
    paths = [Path(path) for path in files.told["paths"]]
    assert all(path.exists() for path in paths)
    del files
    assert not any(path.exists() for path in paths)


def test_a_number_that_became_another_files_is_not_read() -> None:
    here, there = static(), static()
    here.make(IDS, 2)
    one, other, files = exchange(here), exchange(there), Files(1)
    form, before = other.form.hex(), files.told
    files.close()
    files = Files(1)
    assert files.told["paths"] == before["paths"]
    packed = one.answer(None, {"pack": IDS, "form": form, "into": files.told})
    question = {"unpack": IDS, "form": form, "from": before, "tokens": TOKENS, "kept": packed["kept"], "made": True}
    assert other.answer(None, question) == {"why": "what came is no entry of this segment"}
    assert "why" in one.answer(None, {"pack": IDS, "form": form, "into": before})
    assert other.answer(None, {**question, "from": files.told}) == {}


@pytest.mark.parametrize("changed", [{"unpack": [5, *IDS[1:]]}, {"cache_salt": "of another tenant"}])
def test_an_entry_of_another_segment_is_not_kept(changed: dict[str, Any]) -> None:
    here, there = static(), static()
    here.make(IDS, 2)
    assert sent(exchange(here), exchange(there), **changed) == {"why": "what came is no entry of this segment"}
    assert len(there.index) == 0


@pytest.mark.parametrize("row", [999, 5, 3, -2])
def test_rows_of_transitions_that_did_not_come_are_refused(row: int) -> None:
    here, there = static(), static()
    entry = here.make(IDS, 4)
    assert entry.transitions.size == 3
    one, other, files = exchange(here), exchange(there), Files(1)
    form = other.form.hex()
    packed = one.answer(None, {"pack": IDS, "form": form, "into": files.told})
    with open(files.told["paths"][0], "rb+") as file:
        file.seek(HEAD_BYTES + here.store.state_bytes)
        file.write(row.to_bytes(8, "little", signed=True))
    question = {"unpack": IDS, "form": form, "from": files.told, "tokens": TOKENS, "kept": packed["kept"]}
    assert other.answer(None, {**question, "made": True}) == {"why": "what came is no entry of this segment"}
    assert len(there.index) == 0
    there.index.check()


@pytest.mark.parametrize("stays", [1, 3])
def test_who_says_how_many_bytes_an_entry_has_at_most(stays: int) -> None:
    here = static()
    here.make(IDS, stays)
    one, files = exchange(here), Files(1)
    packed = one.answer(None, {"pack": IDS, "form": one.form.hex(), "into": files.told})
    itself, token = one.answer(None, {"who": None})["sizes"]
    most = itself + token * TOKENS
    assert packed["bytes"] == most if stays == 1 else packed["bytes"] < most
