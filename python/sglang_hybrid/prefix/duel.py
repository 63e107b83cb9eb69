"""How far the forecast may be trusted when it would rather not keep what a request has just made.

Refusing a new entry is the one decision in which the forecast can do much worse than recency, which never refuses: with
few observations, or where the gaps tell nothing, it starves conversations that are going on. So every time a new entry
scores lowest, it is paired with the entry that would go instead, whichever of the two goes. The history sees the next
use of either, held or not: the one used first has won, weighted by its tokens per byte. The share of wins sets the
`margin`: a new entry is refused only if its score is below `margin` times that of its rival.
"""

from collections import deque

from sglang_hybrid.core.errors import InvariantError
from sglang_hybrid.prefix.mark import Mark

CAUTION = 0.5  # margin while refusals do not prove right
TRUST_FROM, TRUST_TO = 0.45, 0.55  # share of duels won where the margin leaves CAUTION and reaches 1
PRIOR_WON, PRIOR_LOST = 4.0, 6.0
MEMORY = 200.0  # duels after which an old one weighs 1/e


class _Duel:
    __slots__ = ("made", "made_density", "open", "rival", "rival_density")

    def __init__(self, made: Mark, rival: Mark, made_density: float, rival_density: float) -> None:
        self.made = made
        self.rival = rival
        self.made_density = made_density
        self.rival_density = rival_density
        self.open = True


class Duels:
    """The last `remembered` pairs of a new entry and its rival, and the score kept of them."""

    def __init__(self, remembered: int = 2000) -> None:
        self._remembered = remembered
        self._won, self._lost = PRIOR_WON, PRIOR_LOST
        self._order: deque[_Duel] = deque()
        self._by_mark: dict[Mark, list[_Duel]] = {}

    @property
    def margin(self) -> float:
        """What the score of a rival is multiplied with before a new entry is refused, in [CAUTION, 1]."""
        share = self._won / (self._won + self._lost)
        trust = min(1.0, max(0.0, (share - TRUST_FROM) / (TRUST_TO - TRUST_FROM)))
        return CAUTION + (1.0 - CAUTION) * trust

    def pair(self, made: Mark, rival: Mark, made_density: float, rival_density: float) -> None:
        """`made` scored lower than `rival`; the densities are tokens saved per byte freed, in any unit."""
        best = max(made_density, rival_density)
        if made is rival or best <= 0.0:
            return
        duel = _Duel(made, rival, made_density / best, rival_density / best)
        self._order.append(duel)
        self._by_mark.setdefault(made, []).append(duel)
        self._by_mark.setdefault(rival, []).append(duel)
        if len(self._order) > self._remembered:
            old = self._order.popleft()
            for mark in (old.made, old.rival):
                left = [one for one in self._by_mark.get(mark, ()) if one is not old]
                if left:
                    self._by_mark[mark] = left
                else:
                    self._by_mark.pop(mark, None)

    def used(self, mark: Mark) -> None:
        """A request would have restarted from `mark`: its open duels are decided."""
        for duel in self._by_mark.pop(mark, ()):
            if duel.open:
                duel.open = False
                self._won -= self._won / MEMORY
                self._lost -= self._lost / MEMORY
                if duel.made is mark:
                    self._lost += duel.made_density
                else:
                    self._won += duel.rival_density

    def check(self) -> None:
        """Raise InvariantError if more is remembered than may be, or a pair is filed under a stranger."""
        if len(self._order) > self._remembered:
            raise InvariantError(f"at most {self._remembered} duels are remembered: {len(self._order)}")
        for mark, duels in self._by_mark.items():
            if not duels or any(mark is not duel.made and mark is not duel.rival for duel in duels):
                raise InvariantError(f"a duel is filed under its two marks only: {len(duels)}")
