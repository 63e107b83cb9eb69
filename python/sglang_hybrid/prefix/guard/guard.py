"""A bound against LRU for any order of eviction: while it costs too much, the least recently used leaves instead.

A shadow (`shadow`) holds the metadata of the cache that LRU would hold now: the same admissions, the same capacity. At
every request it tells how many tokens LRU would have skipped beside those that were. The order of the policy is
followed until it is behind LRU by more than an eighth of the tokens LRU holds, after what it had won before, up to the
whole of that, is used up. Then evictions follow recency until as much was saved as LRU holds; then the policy has its
order back. Each time it falls behind again, before everything it ever lost is won back, the time under recency
doubles.

**Bound.** For a cache of states with one byte budget (`sim.cache`), whose requests come one after the other, find
nothing locked and fit with all that is saved of them: be A the sum of 9/8 of the tokens LRU holds, one prompt, and the
positions of the states LRU holds added up, each at its largest so far; be T how often the shadow was filled anew
(`ShadowLru.turnovers`). Then at any time, for every policy and every sequence of requests,

    tokens skipped >= tokens LRU would have skipped - A * (3 + log2(1 + T))

"LRU" is the shadow: it is offered what is saved here, and what it would save itself where a request skips more here
(`passed`; while recency rules, of that only where the request resumes). The proof:

1. A phase of the policy begins with a balance of 0 and ends when it is below minus an eighth. The balance is never
   above what was won, so the phase loses at most an eighth of what LRU holds and the tokens of its last request; what
   is left of a phase after a moment at which nothing was owed loses 9/8 and those tokens at most.
2. Uses count under recency as they count for LRU (`Decisions.uses`). So what was saved or used
   since the phase of recency began is as old here as in the shadow, and what only is held here is older than all that
   LRU holds. It goes first, and without it there is no more to hold than LRU holds. So nothing of that leaves before
   LRU drops it.
3. A loss under recency is a state that LRU held when the phase began and that is not held here, or was used here at
   another time. Its position is saved by the request that lost it (`restored`), and by 2 it is not lost again. So the
   phase loses at most the positions of the states LRU held when it began.
4. By 1 and 3 a phase of each costs at most A. Be t0 the last time at which nothing was owed: what was lost then, was
   lost since. The k-th relapse after t0 holds for 2^(k-1) turnovers, so n of them take T >= 2^(n-1) - 1. What was
   under way at t0, the n relapses and what is under way now cost at most A * (n + 2).

What weakens it: in a server steps 2 and 3 hold up to what running requests lock, to states for which there is no slot
or that a pass cannot save where LRU resumes, and to the time between a request's arrival and the insertion of what it
computed. With two pools the order of states and that of leaves are two, and LRU may hold what here left for want of
the other kind. There the account is the same, and a phase of the policy still loses no more than step 1 says; that a
phase of recency loses little is tested (`test_guard.py`), not proven. Nothing is claimed where KV alone is cached.
With a host tier there is no guard.

Kin: following the better of two caching algorithms by their simulated costs is Fiat et al. (1991, "Competitive paging
algorithms") and Blum and Burch (2000); simulated LRU directories as judges are those of ARC (Megiddo and Modha 2003),
LeCaR (Vietri et al. 2018) and set duelling (Qureshi et al. 2007); the balance is Page's CUSUM test (1954).
"""

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.prefix.admission import MOST_POSITIONS, AdmissionPolicy
from sglang_hybrid.prefix.eviction.candidates import Candidate, VictimIndex
from sglang_hybrid.prefix.guard.heap import Heap, Place
from sglang_hybrid.prefix.guard.shadow import ShadowLru
from sglang_hybrid.prefix.request import Request
from sglang_hybrid.prefix.tree.radix_tree import Match
from sglang_hybrid.prefix.tree.tokens import Tokens

DEBT = 0.125  # of the tokens LRU holds: how far the policy may fall behind
SAVINGS = 1.0  # the same: how much of what it won before it may lose again


class Guard:
    """Keeps the account of one cache. `by_recency`: evictions have to follow recency now.

    `owed` is by how many tokens LRU is ahead, `relapses` how often recency took over.
    """

    def __init__(self, kv_bytes: int, state_bytes: int) -> None:
        self.shadow = ShadowLru(kv_bytes, state_bytes)
        self.by_recency = False
        self.owed = 0
        self.relapses = 0
        self._balance = 0.0
        self._until = 0.0
        self._level = 0

    def arrive(self, tokens: Tokens, limit: int, resume_tokens: int) -> Match:
        """A request may skip `limit` of `tokens` and skips `resume_tokens` of them; returns what LRU would find.

        A `limit` of 0 keeps a request out of the account: nothing could have been skipped.
        """
        found = self.shadow.match(tokens, limit)
        self._account(min(resume_tokens, limit) - found.resume_tokens)
        return found

    def _account(self, lead: int) -> None:
        self.owed = max(0, self.owed - lead)
        if not self.owed:
            self._level = 0
        held_tokens, turnovers = self.shadow.tree.kv_tokens, self.shadow.turnovers
        if self.by_recency:
            if turnovers >= self._until:
                self.by_recency, self._balance = False, 0.0
            return
        self._balance = min(self._balance + lead, SAVINGS * held_tokens)
        if self._balance < -DEBT * held_tokens:
            self.by_recency = True
            self._until = turnovers + 2.0**self._level
            self._level += 1
            self.relapses += 1

    def check(self) -> None:
        """Raise InvariantError where the shadow contradicts itself or the account cannot be."""
        self.shadow.check()
        if self.owed < 0 or self._level > self.relapses:
            raise InvariantError(f"nothing less than 0 is owed, and levels are relapses: {self.owed}, {self._level}")


def restored(positions: list[int], resume_tokens: int, lru_tokens: int) -> list[int]:
    """The `positions` to save and, under recency, where LRU resumes a request that resumes earlier here."""
    if lru_tokens <= resume_tokens or lru_tokens in positions:
        return positions
    return sorted([*positions[-(MOST_POSITIONS - 1) :], lru_tokens])


def passed(admission: AdmissionPolicy, guard: Guard, request: Request, kv_tokens: int) -> list[int]:
    """What LRU, which resumes `request` at its `lru_tokens` and has KV of `kv_tokens`, would save of what it skips.

    Under recency that is where the request resumes: of what lies before it is not known whether it is held here.
    """
    start = request.cached_tokens
    if guard.by_recency:
        return [start]
    end = request.prompt_tokens - 1
    return [at for at in admission.positions(request, request.lru_tokens, end, kv_tokens) if at <= start]


class GuardedIndex:
    """Victims by a policy's order, or by recency while the guard says so. Recency is exact: the lowest `touch` goes."""

    def __init__(self, policy: VictimIndex, guard: Guard) -> None:
        self._policy, self._guard = policy, guard
        self._recency: Heap[int] = Heap()
        self._places: dict[int, Place[int]] = {}

    def put(self, candidate: Candidate) -> None:
        self._policy.put(candidate)
        place = self._places.get(candidate.id)
        if place is None:
            place = self._places[candidate.id] = Place(candidate.id)
        elif place.key == candidate.touch:
            return
        self._recency.put(place, candidate.touch)

    def discard(self, candidate_id: int) -> None:
        self._policy.discard(candidate_id)
        self._forget(candidate_id)

    def pop(self, now: float) -> int | None:
        if self._guard.by_recency:
            oldest = self._recency.first()
            victim = None if oldest is None else oldest.item
            if victim is not None:
                self._policy.discard(victim)
        else:
            victim = self._policy.pop(now)
        if victim is not None:
            self._forget(victim)
        return victim

    def _forget(self, candidate_id: int) -> None:
        place = self._places.pop(candidate_id, None)
        if place is not None:
            self._recency.remove(place)

    def __len__(self) -> int:
        return len(self._places)

    def check(self) -> None:
        self._policy.check()
        standing = all(self._recency.stands(place) for place in self._places.values())
        sizes = len(self._places), len(self._recency), len(self._policy)
        if not standing or sizes[0] != sizes[1] or sizes[2] > sizes[0]:
            raise InvariantError(f"recency knows every entry, and the policy no other; counts: {sizes}")
