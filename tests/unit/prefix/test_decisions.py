"""The decisions of a serving cache, its log, and the replay of it."""

import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix.admission import MOST_POSITIONS, Places
from sglang_hybrid.prefix.decisions import Decisions
from sglang_hybrid.prefix.eviction.candidates import Candidate
from sglang_hybrid.prefix.policies import served
from sglang_hybrid.prefix.pools import PoolKind
from sglang_hybrid.prefix.replay import replay
from sglang_hybrid.prefix.request import Request
from sglang_hybrid.prefix.request_log import RecordedDecisions, RequestLog, chained, check_writable
from sglang_hybrid.prefix.seeds import read_prefixes
from sglang_hybrid.prefix.tree.mark import Kind, Mark
from sglang_hybrid.prefix.tree.tokens import Tokens

SPEC = ModelSpec("serving", 256, 4096, 1000.0, 1.0)


def words(rng: random.Random, count: int) -> Tokens:
    return np.array([rng.randrange(1000) for _ in range(count)], np.int32)


def test_the_second_sighting_of_a_prefix_is_checkpointed_at_the_branch_and_before_its_end() -> None:
    rng, decisions = random.Random(1), Decisions(SPEC)
    shared = words(rng, 300)
    first = decisions.arrive("a", np.concatenate((shared, words(rng, 50))), 0.0, 0, 0)
    assert first.positions == (349,)
    decisions.finish(first, np.concatenate((shared, words(rng, 80))), 1.0, 380)
    second = decisions.arrive("b", np.concatenate((shared, words(rng, 60))), 2.0, 0, 0)
    assert second.positions == (300, 359)
    assert second.seen_tokens == 300


def test_a_branch_is_recognised_while_the_other_request_still_runs() -> None:
    rng, decisions = random.Random(2), Decisions(SPEC)
    shared = words(rng, 300)
    decisions.arrive("a", np.concatenate((shared, words(rng, 50))), 0.0, 0, 0)
    running = decisions.arrive("b", np.concatenate((shared, words(rng, 60))), 0.1, 0, 0)
    assert running.positions == (300, 359)
    assert running.in_flight_tokens == 300
    decisions.computed("a")
    decisions.computed("b")
    assert decisions.arrive("c", np.concatenate((shared, words(rng, 70))), 0.2, 300, 300).in_flight_tokens == 0


def test_namespaces_share_nothing() -> None:
    rng, decisions = random.Random(3), Decisions(SPEC)
    prompt = words(rng, 200)
    decisions.arrive("a", prompt, 0.0, 0, 0, namespace="one")
    assert decisions.arrive("b", prompt, 1.0, 0, 0, namespace="two").seen_tokens == 0
    assert decisions.arrive("c", prompt, 2.0, 0, 0, namespace="one").seen_tokens == 200


def test_a_boundary_at_the_end_of_a_prompt_outlives_the_answer() -> None:
    rng, decisions = random.Random(1), Decisions(SPEC)
    document = words(rng, 300)
    warm_up = decisions.arrive("warm-up", document, 0.0, 0, 0, boundaries=(300,))
    declared = warm_up.tip
    assert decisions.superseded(warm_up, declared, 300, 1.0) is None
    decisions.finish(warm_up, np.concatenate((document, words(rng, 1))), 1.0, 300)
    assert warm_up.tip is not declared
    asked = decisions.arrive("asked", np.concatenate((document, words(rng, 50))), 2.0, 300, 300)
    assert (300, declared) in asked.earlier
    assert declared.kind is Kind.BRANCH


def test_declared_boundaries_and_seeds_are_checkpointed_at_once() -> None:
    rng, decisions = random.Random(4), Decisions(SPEC)
    prompt = words(rng, 200)
    assert decisions.arrive("a", prompt, 0.0, 0, 0, boundaries=(120,)).positions == (120, 199)
    seeded = words(rng, 150)
    decisions.seed(seeded, 0.0)
    assert 150 in decisions.arrive("b", np.concatenate((seeded, words(rng, 50))), 1.0, 0, 0).positions
    with pytest.raises(ConfigError, match="position in the 200 tokens"):
        decisions.arrive("c", prompt, 2.0, 0, 0, boundaries=(201,))


@pytest.mark.parametrize("more", [0, 50])
def test_a_seed_counts_as_seen_once_somebody_computed_it(more: int) -> None:
    rng, decisions = random.Random(14), Decisions(SPEC)
    outer = words(rng, 300)
    decisions.seed(outer[:150], 0.0)
    decisions.seed(outer, 0.0)
    prompt = np.concatenate((outer, words(rng, more)))
    parts = np.concatenate((outer[:100], words(rng, 20)))
    assert decisions.arrive("a", parts, 0.5, 0, 0).seen_tokens == 0
    first = decisions.arrive("b", prompt, 1.0, 0, 0)
    assert first.seen_tokens == 100
    assert 150 in first.positions
    assert decisions.arrive("c", prompt, 2.0, 0, 0).seen_tokens == 300 + more


def test_what_an_aborted_request_did_not_compute_is_forgotten() -> None:
    rng, decisions = random.Random(15), Decisions(SPEC)
    prompt, other = words(rng, 400), words(rng, 60)
    aborted = decisions.arrive("a", prompt, 0.0, 0, 0, boundaries=(20, 350))
    decisions.finish(aborted, prompt[:128], 1.0, 128)
    decisions.check()
    assert decisions.arrive("b", np.concatenate((prompt[:300], other)), 2.0, 0, 128).seen_tokens == 128
    again = decisions.arrive("c", prompt, 3.0, 0, 128)
    assert again.seen_tokens == 300, "another one computed that"
    decisions.finish(again, prompt[:0], 4.0, 0)
    assert decisions.arrive("d", prompt, 5.0, 0, 128).seen_tokens == 300
    decisions.finish(decisions.arrive("x", other, 6.0, 0, 0), other[:0], 6.0, 0)
    assert decisions.arrive("y", other, 7.0, 0, 0).seen_tokens == 0
    decisions.check()


def test_how_much_was_kept_is_asked_of_whoever_went_on() -> None:
    rng, decisions = random.Random(16), Decisions(SPEC)
    whole, other = words(rng, 1000), words(rng, 50)

    def kept(shared: int) -> int:
        probe = np.concatenate((whole[:shared], words(rng, 50)))
        return decisions.arrive(f"probe {shared}", probe, 9.0, 0, 0).kept_tokens

    assert decisions.arrive("0", other, 0.0, 0, 0).kept_tokens == -1
    first = decisions.arrive("1", whole[:400], 0.0, 0, 0)
    decisions.finish(first, whole[:512], 1.0, 448)
    assert [kept(at) for at in (500, 512)] == [448, 448]
    decisions.finish(decisions.arrive("2", whole[:700], 2.0, 448, 448), whole, 3.0, 960)
    assert [kept(at) for at in (510, 512, 900, 1000)] == [960, 960, 960, 960]


def test_a_lost_state_is_told_to_the_request_that_wanted_it() -> None:
    rng, decisions = random.Random(5), Decisions(SPEC)
    prompt, more = words(rng, 200), words(rng, 40)
    first = decisions.arrive("a", prompt, 0.0, 0, 0)
    decisions.finish(first, np.concatenate((prompt, more)), 1.0, 240)
    decisions.evicted(first.tip)
    again = decisions.arrive("b", np.concatenate((prompt, more, words(rng, 20))), 2.0, 0, 240)
    assert again.lost_tokens == 240


@pytest.mark.parametrize("policy", [*served(), "marconi:0.5"])
def test_a_replay_takes_the_same_decisions(policy: str, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    log = RequestLog(path, 10_000_000)
    evicted = drive(RecordedDecisions(log, SPEC, policy), requests=300)
    log.close()
    found = replay(path)
    assert found.complete
    assert (found.requests, found.evictions) == (300, evicted)
    assert found.checkpoints >= 300
    assert found.differences == []


def test_a_replay_follows_requests_that_were_aborted_in_mid_prefill(tmp_path: Path) -> None:
    """They end with less than their input, and the history learns that much: their end is a resume point."""
    path, rng = tmp_path / "requests.jsonl", random.Random(8)
    log = RequestLog(path, 10_000_000)
    decisions = RecordedDecisions(log, SPEC, "forecast")
    prompt = words(rng, 400)
    aborted = decisions.arrive("a", prompt, 0.0, 0, 0)
    decisions.finish(aborted, prompt[:256], 1.0, 256)
    assert [at for at in aborted.marks if aborted.marks[at] is aborted.tip] == [256]
    for number in range(3):  # those who come later part from it too soon behind that for a branch of its own
        later = np.concatenate((prompt[:270], words(rng, 50)))
        arrival = decisions.arrive(str(number), later, 2.0 + number, 0, 0)
        decisions.put(PoolKind.STATES, candidate(number, 256, arrival.marks[256]))
        decisions.victim(PoolKind.STATES, 3.0 + number)
        decisions.finish(arrival, later, 4.0 + number, 320)
    log.close()
    found = replay(path)
    assert found.differences == []
    assert found.evictions == 3


def test_a_replay_follows_requests_that_were_retracted_in_mid_answer(tmp_path: Path) -> None:
    """They compute their answer like a prompt, with states behind what arrived."""
    path, rng = tmp_path / "requests.jsonl", random.Random(9)
    log = RequestLog(path, 10_000_000)
    decisions = RecordedDecisions(log, SPEC, "forecast")
    prompt = words(rng, 200)
    request = decisions.arrive("a", prompt, 1.0, 0, 0)
    decisions.computed("a")
    decisions.saved(request, [199])
    decisions.saved(request, [230])
    decisions.computed("a")
    decisions.finish(request, np.concatenate((prompt, words(rng, 60))), 2.0, 250)
    decisions.arrive("b", prompt, 3.0, 199, 199)
    log.close()
    found = replay(path)
    assert (found.requests, found.differences) == (2, [])


def test_a_replay_notices_another_decision(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    log = RequestLog(path, 10_000_000)
    drive(RecordedDecisions(log, SPEC, "forecast"), requests=100)
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    next(line for line in lines if line[0] == "arrive")[9] = [7]
    next(line for line in lines if line[0] == "victim" and line[3] is not None)[3] += 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(replay(path).differences) >= 2


def drive(decisions: Decisions, requests: int) -> int:
    """Conversations, shared prefixes and random candidates; returns the evictions."""
    rng, now, evicted = random.Random(6), 0.0, 0
    shared = [words(rng, 120) for _ in range(4)]
    for number in range(requests):
        now += rng.expovariate(0.5)
        prompt = np.concatenate((rng.choice(shared), words(rng, rng.randint(5, 60))))
        arrival = decisions.arrive(str(number), prompt, now, 0, 0, rng.choice([None, "tenant"]))
        for at in arrival.positions:
            mark = decisions.mark(arrival, at, now)
            key = number * 10 + len(arrival.positions)
            decisions.put(rng.choice(list(PoolKind)), candidate(key + at, at, mark))
        if number % 3 == 2:
            victim = decisions.victim(rng.choice(list(PoolKind)), now)
            evicted += victim is not None
        decisions.discard(PoolKind.KV, rng.randrange(number * 10 + 400))
        whole = np.concatenate((prompt, words(rng, 20)))
        end = rng.randrange(1, len(whole)) if number % 5 == 4 else len(whole)  # some are aborted, in mid-prefill too
        decisions.finish(arrival, whole[:end], now + 0.1, min(end, len(prompt)))
        decisions.check()
    return evicted


def candidate(id_: int, at: int, mark: Mark) -> Candidate:
    return Candidate(id_, at, 0, 0, at, 1, 0, mark.last_s, mark.touch, mark.hits, False, mark.reuse_class)


def test_hashed_tokens_keep_prefixes_and_nothing_else() -> None:
    rng = random.Random(7)
    shared = words(rng, 50)
    one, other = (np.concatenate((shared, words(rng, 30))) for _ in range(2))
    a, b = chained(one, 11), chained(other, 11)
    assert np.array_equal(a[:50], b[:50])
    assert not np.array_equal(a[50:], b[50:])
    assert len(set(chained(np.zeros(1000, np.int32), 11).tolist())) > 990, "the same token looks new at every place"
    assert not np.array_equal(a, chained(one, 12))
    assert a.dtype == np.int32
    assert a.min() >= 0


def test_a_full_log_says_so_and_the_server_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    log = RequestLog(path, 5_000)
    drive(RecordedDecisions(log, SPEC, "forecast"), requests=50)
    assert path.stat().st_size < 5_100
    assert not replay(path).complete


@pytest.mark.parametrize("text", ["", "{}\n", "[1,{}]\n", "[2,{}]\n", "[2,3]\n", "nonsense"])
def test_a_file_that_is_no_log_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="request log"):
        replay(path)


@pytest.mark.parametrize(
    "line", ['["nothing"]', '["computed"]', '["victim","none",1,2,null]', '["finish","x",1,2,[],2]']
)
def test_a_damaged_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    log = RequestLog(path, 10_000)
    RecordedDecisions(log, SPEC, "forecast")
    log.close()
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        replay(path)


def test_a_full_disk_is_told_at_the_start_and_later_ends_the_log_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="No space left"):
        check_writable(Path("/dev/full"))
    path = tmp_path / "folder" / "requests.jsonl"
    check_writable(path)
    assert path.read_text() == ""
    log = RequestLog(path, 10_000_000)
    decisions = RecordedDecisions(log, SPEC, "forecast")
    drive(decisions, requests=20)
    whole = path.read_bytes()
    full = open("/dev/full", "w")  # noqa: SIM115
    os.dup2(full.fileno(), log._file.fileno())  # type: ignore[union-attr]
    full.close()
    evicted = drive(decisions, requests=20)
    assert evicted > 0
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "No space left on device" in caplog.text
    check_writable(path)
    assert path.read_bytes() == whole, "a check leaves what is there"
    assert path.stat().st_mode & 0o077 == 0
    path.write_bytes(whole[:-5])  # what a disk keeps of the last line
    found = replay(path)
    assert (found.complete, found.differences) == (False, [])


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown policy"):
        Decisions(SPEC, "fifo")
    with pytest.raises(ConfigError, match=r"as marconi:0\.5"):
        Decisions(SPEC, "marconi:much")
    with pytest.raises(ConfigError, match="0 or more"):
        Decisions(SPEC, "marconi:-1")
    with pytest.raises(ConfigError, match="cannot write the request log"):
        RequestLog(tmp_path, 100)
    with pytest.raises(ConfigError, match="more than zero bytes"):
        RequestLog(tmp_path / "log", 0)


def test_hot_prefixes_are_read_or_the_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "hot.jsonl"
    path.write_text('{"input_ids": [1, 2]}\n\n{"input_ids": [3]}\n')
    assert [prefix.tolist() for prefix in read_prefixes(str(path))] == [[1, 2], [3]]
    assert read_prefixes("") == []
    path.write_text('{"input_ids": [1, 2]}\n{"input_ids": [-1]}\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_prefixes(str(path))
    with pytest.raises(ConfigError, match="cannot read"):
        read_prefixes(str(tmp_path / "none"))


def test_one_request_takes_few_checkpoints_however_many_were_declared_before_it() -> None:
    rng, decisions = random.Random(31), Decisions(SPEC)
    prompt = words(rng, 8000)
    for request in range(250):
        boundaries = tuple(sorted(rng.sample(range(1, 8001), 32)))
        arrival = decisions.arrive(str(request), prompt, float(request), 0, 0, boundaries=boundaries)
        assert len(arrival.positions) <= MOST_POSITIONS
        decisions.finish(arrival, prompt, request + 0.5, 0)
    plain = decisions.arrive("plain", prompt, 300.0, 0, 0)
    assert plain.positions[-1] == 7999
    assert len(plain.positions) <= MOST_POSITIONS


def test_a_namespace_takes_the_same_memory_however_long_its_name_is() -> None:
    decisions, name = Decisions(SPEC), "salt" * 500_000
    tokens = np.arange(3, dtype=np.int32)
    first = decisions.arrive("a", tokens, 0.0, 0, 0, name)
    decisions.finish(first, tokens, 1.0, 3)
    assert decisions.arrive("b", tokens, 2.0, 0, 0, name).seen_tokens == 3
    assert decisions.arrive("c", tokens, 3.0, 0, 0, name + "x").seen_tokens == 0
    assert decisions.arrive("d", tokens, 4.0, 0, 0, "\ud800").seen_tokens == 0, "text that no encoding has"
    assert sum(map(sys.getsizeof, decisions.namespaces._numbers)) < 1000


def conversation(decisions: Decisions, turns: int, behind: int) -> list[Request]:
    """Turns that continue each other, each with a position declared `behind` tokens before its prompt's end."""
    rng, so_far, found = random.Random(3), np.zeros(0, np.int32), []
    for turn in range(turns):
        prompt = np.concatenate((so_far, words(rng, 200)))
        request = decisions.arrive(f"{turn}", prompt, 5.0 * turn, 0, 0, boundaries=(prompt.size - behind,))
        so_far = np.concatenate((prompt, words(rng, 30)))
        decisions.finish(request, so_far, 5.0 * turn, int(so_far.size))
        found.append(request)
    return found


@pytest.mark.parametrize(("behind", "shared"), [(3, False), (150, True), (0, True)])
def test_a_mark_right_before_a_prompts_end_is_its_conversations_and_others_are_for_all(
    behind: int, shared: bool
) -> None:
    decisions = Decisions(SPEC, where=Places(64))
    first, _ = conversation(decisions, 2, behind)
    mark = first.marks[200 - behind]
    assert mark.shared is shared
    again = decisions.arrive("again", np.concatenate((first.key[1:201], words(random.Random(9), 90))), 11.0, 0, 0)
    assert (200 - behind in again.positions) is shared
    decisions.check()


def test_a_state_that_is_superseded_stands_for_what_was_declared_right_before() -> None:
    decisions = Decisions(SPEC, where=Places(64))
    (request,) = conversation(decisions, 1, 3)
    near = request.marks[197]
    assert decisions.superseded(request, request.marks[200], 192, 1.0) is near
    other = decisions.superseded(request, request.marks[200], 128, 1.0)
    assert other is not None
    assert other.kind is Kind.SUPERSEDED
