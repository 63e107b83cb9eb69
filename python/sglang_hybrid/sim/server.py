"""A simulated server: SGLang's scheduler and two pools of fixed size as far as they decide what is cached.

A running request has slots of its own, prefills come in chunks, states lie on a grid, and memory is made when a pass or
a step of decoding needs it. The decisions are those of the server. So one that is fed the requests of a real server,
one after the other, serves the same hits (tests/engine/test_simulated_server.py).
"""

from collections import Counter

from sglang_hybrid.core.errors import ConfigError
from sglang_hybrid.core.spec import ModelSpec
from sglang_hybrid.prefix import policies
from sglang_hybrid.prefix.admission import Places, answer_place, keeps_end, own_place, places
from sglang_hybrid.prefix.decisions import Decisions
from sglang_hybrid.prefix.eviction.candidates import Candidate
from sglang_hybrid.prefix.pools import AHEAD, PoolKind
from sglang_hybrid.prefix.request import NO_LIMIT, Request
from sglang_hybrid.prefix.reuse.hints import NO_HINTS, Hints
from sglang_hybrid.prefix.tree.mark import Mark
from sglang_hybrid.prefix.tree.node import Node
from sglang_hybrid.prefix.tree.tokens import Tokens, as_tokens
from sglang_hybrid.sim.keys import Keys
from sglang_hybrid.sim.running import Running
from sglang_hybrid.sim.shape import Shape
from sglang_hybrid.sim.tree_cache import TreeCache


class SimulatedServer(TreeCache):
    """A server of `shape` for `model` under `policy`."""

    def __init__(
        self,
        model: ModelSpec,
        shape: Shape,
        policy: str | policies.Policy = policies.DEFAULT,
        guarded: bool = True,
        pools: tuple[PoolKind, ...] = (PoolKind.STATES, PoolKind.KV),
    ) -> None:
        where = Places(shape.grid, shape.step, shape.page)
        super().__init__(Decisions(model, policy, where=where, guarded=guarded), pools, False)
        self.shape = shape
        self.running: dict[str, Running] = {}
        self._stock = self.decisions.policy.stock
        self._slots = 0  # of running requests
        self._own_tokens = 0
        self._keys = Keys(shape.page)

    @property
    def free_states(self) -> int:
        """Slots in which there is nothing."""
        return self.shape.states - self.tree.states - self._slots

    @property
    def free_tokens(self) -> int:
        """Tokens of KV that nobody has."""
        return self.shape.kv_tokens - self.tree.kv_tokens - self._own_tokens

    def holds(self, tokens: int) -> bool:
        """Whether a request of so many tokens in all can ever run."""
        return 0 < self.shape.paged(tokens) <= self.shape.kv_tokens

    def room_for(self, tokens: int) -> bool:
        """Whether a request of so many tokens in all can run beside those that do, whatever has to be evicted."""
        runs, paged = self.running.values(), self.shape.paged
        held = sum(run.own_tokens + (0 if run.held is None else run.held.end) for run in runs)
        promised = sum(max(0, paged(run.promised) - paged(run.computed)) for run in runs)
        slots = sum(run.slots for run in runs) + sum(run.copies for run in runs)
        fits = held + promised + paged(tokens) <= self.shape.kv_tokens
        return fits and slots + self.shape.wanted_states < self.shape.states

    def lookup(self, tokens: Tokens, now: float) -> int:
        """Tokens of the prompt `tokens` that could be skipped now; 0 for one that the server can never hold."""
        if not self.holds(len(tokens)):
            return 0
        return self.tree.match(self._keys.of(as_tokens(tokens)[: max(0, len(tokens) - 1)])).resume_tokens

    def commit(
        self, tokens: Tokens, n_input: int, now: float, boundaries: tuple[int, ...] = (), hints: Hints = NO_HINTS
    ) -> None:
        """Serve a request from its arrival to its end: `tokens` are its prompt and its answer.

        One that the server can never hold is refused, as SGLang does.
        """
        tokens = as_tokens(tokens)
        if not n_input or not self.holds(tokens.size):
            return
        self.arrive("", tokens[:n_input], now, None, boundaries, hints=hints)
        computed = max(n_input, tokens.size - 1)  # nobody computes the last token of an answer
        self.decode("", computed - n_input, now)
        self.finish("", tokens[:computed], now)

    def arrive(
        self,
        request_id: str,
        tokens: Tokens,
        now: float,
        namespace: str | None = None,
        boundaries: tuple[int, ...] = (),
        limit: int = NO_LIMIT,
        answer_tokens: int = 0,
        hints: Hints = NO_HINTS,
    ) -> int:
        """Match the prompt `tokens` and compute it; returns how many tokens of it were skipped.

        It may resume at `limit` at most; its answer takes up to `answer_tokens` (`room_for` counts on them). Raises
        ConfigError if the server can never hold it.
        """
        tokens = as_tokens(tokens)
        run = Running(request_id, tokens, namespace, boundaries, limit, self._keys.of(tokens, namespace), hints)
        run.promised = tokens.size + answer_tokens
        self.running[request_id] = run
        self._match(run, now)
        chunk = self.shape.chunk_tokens or max(1, tokens.size)
        while run.computed < tokens.size:
            self._pass(run, min(run.computed + chunk, tokens.size), now)
        return run.cached_tokens

    def _match(self, run: Running, now: float) -> None:
        """Find where the prompt resumes, and a slot for the copy of the state there."""
        tree, most = self.tree, min(int(run.tokens.size) - 1, run.limit)
        found = tree.match(run.key[: most // self.shape.page * self.shape.page])
        if found.partial is not None:
            self._split(tree.split(found.partial, found.kv_tokens))  # as SGLang does
        self._hold(run, found.resume_node)
        if found.resume_node.state is not None:
            self._states_in_use[found.resume_node.id] += 1
            run.copies = True
            tree.changed[found.resume_node.id] = found.resume_node
            if self._states(1, now):
                self._take(run, 1)
            else:
                self._hold(run, tree.root)
        assert run.held is not None
        run.cached_tokens = run.computed = run.held.end
        run.kv_tokens = max(run.cached_tokens, found.kv_tokens)

    def _pass(self, run: Running, end: int, now: float) -> None:
        """Compute the prompt up to `end`, and save the states that were decided on."""
        start, last = run.computed, end == run.tokens.size
        self._admit(run, end, now)
        if run.request is None:
            run.request = self._learn(run, now)
        request = run.request
        grid, step, page = self.shape.grid, self.shape.step, self.shape.page
        ours = step and not self._stock
        wanted_at = places(request.positions, start, end, grid, step, page) if ours else {}
        tail = own_place(start, end, grid)
        if self._stock:
            branch = run.kv_tokens // grid * grid
            tail = branch if start < branch <= end else tail  # SGLang saves one of the two
        if last and self.shape.buffers:
            wanted_at.pop(tail, None)
        planned = self._reserve(run, wanted_at, now)
        self._slots += len(planned)  # until they are inserted
        run.computed = end
        run.planned, run.tail = planned, tail if tail > start else 0
        if last:
            self.decisions.computed(run.id)
        else:
            self._save_pass(run, False, now)

    def _learn(self, run: Running, now: float) -> Request:
        decisions, node = self.decisions, run.held
        assert node is not None
        request = decisions.arrive(
            run.id, run.tokens, now, run.cached_tokens, run.kv_tokens, run.namespace, run.boundaries,
            min(run.limit, int(run.tokens.size)), run.hints,
        )  # fmt: skip
        self.resume(request, node)
        return request

    def _reserve(self, run: Running, wanted_at: dict[int, int], now: float) -> dict[int, int]:
        """The places for which there are free slots, or worth more than what is evicted for them."""
        request = run.request
        assert request is not None
        kept, short = dict(wanted_at), len(wanted_at) - self.free_states
        if short <= 0 or not wanted_at:
            return kept
        contenders = self.decisions.contenders(request, wanted_at, now)
        for number in self._contest(contenders, short, now):
            self._refuse(request, kept, contenders[number].end_tokens)
        return kept

    def _contest(self, contenders: dict[int, Candidate], short: int, now: float) -> list[int]:
        """Evict what is worth less than `contenders`, for which `short` slots are missing; ids of those that lose."""
        victims, lost = self.weakest(PoolKind.STATES, contenders, min(short, len(contenders)), now)
        if victims:
            self._evict(PoolKind.STATES, len(victims), self.shape.states, now, victims)
        return lost

    @staticmethod
    def _refuse(request: Request, kept: dict[int, int], at: int) -> None:
        if (mark := request.marks.get(kept.pop(at))) is not None:
            mark.refused = True

    def _save_pass(self, run: Running, last: bool, now: float) -> None:
        """Insert what a pass computed: the state behind it, those that were planned, and the KV before them."""
        request, shape, planned = run.request, self.shape, run.planned
        assert request is not None
        behind = run.computed - max(planned, default=0)
        takes_end = keeps_end(behind, last, bool(planned), shape.buffers > 0, shape.grid, self._has_spare())
        made = (takes_end or self._stock) and self._states(1, now)
        at = run.tail if shape.buffers else run.computed
        if made and at:
            self._donate(run)
            mark = request.tip if last else self.decisions.mark(request, at, now, spare=True)
        elif planned:
            at = max(planned)
            mark = self.decisions.planned_mark(request, planned.pop(at), now, False)
            self._slots -= 1
        else:
            return
        self._insert(run, at, mark, now)
        if last:
            request.tip.unkept = int(run.tokens.size) - at
        self._save_planned(run, at, mark is request.tip, now)

    def _save_planned(self, run: Running, below: int, later: bool, now: float) -> None:
        """Insert what was planned before `below`, whether or not a `later` end is cached; free the other slots."""
        request, planned = run.request, run.planned
        assert request is not None
        run.planned = {}
        self._slots -= len(planned)
        for at in sorted(planned, reverse=True):
            if at < below:
                self._insert(run, at, self.decisions.planned_mark(request, planned[at], now, later), now)

    def _insert(self, run: Running, at: int, mark: Mark, now: float) -> None:
        """Cache the KV of the first `at` tokens and the state behind them."""
        request, tree, decisions = run.request, self.tree, self.decisions
        assert request is not None
        leaf = tree.insert(run.key[:at], now)
        self._keep(run, leaf)
        if leaf.state is not None:
            decisions.touch(leaf.state)
            tree.changed[leaf.id] = leaf
            decisions.saved(request, [at])
            return
        decisions.touch(mark)
        decisions.saved(request, [at])
        if mark is request.tip:
            earlier, run.tip = run.tip, leaf
            self.supersede(request, earlier, leaf, mark.last_s)
        self._attach(run, leaf, mark)
        self.place(leaf, mark, now)

    def decode(self, request_id: str, tokens: int, now: float) -> None:
        """The running request computes `tokens` more of its answer."""
        run = self.running[request_id]
        if tokens and not run.decodes:
            run.decodes = True
            self._save_pass(run, True, now)
        self._decode(run, tokens, now)

    def _decode(self, run: Running, tokens: int, now: float) -> None:
        page = self.shape.page
        while tokens > 0:
            self._tokens(page, now)  # before every step, whether or not it begins a page
            pages = self.free_tokens // page
            some = min(tokens, -run.computed % page + (0 if not pages else (pages - 1) * page + 1))
            if not some:
                raise ConfigError(f"give the server more KV, running requests fill it: {self.shape.kv_tokens}")
            self._own(run, self.shape.paged(run.computed + some) - self.shape.paged(run.computed))
            run.computed += some
            tokens -= some

    def finish(self, request_id: str, tokens: Tokens, now: float) -> None:
        """The request ended; `tokens` are what was computed of prompt and answer."""
        run = self.running.pop(request_id)
        tokens, request = as_tokens(tokens), run.request
        assert request is not None
        size, shape = int(tokens.size), self.shape
        if not shape.buffers:
            at = size
        elif not run.decodes:
            at = run.tail
        else:
            at = answer_place(int(run.tokens.size), size, shape.track_tokens)
        tip = 0 if run.tip is None or run.tip.parent is None else run.tip.end
        run.key = self._keys.of(tokens, run.namespace)
        self.decisions.finish(request, tokens, now, max(at, tip))
        self._take(run, -run.slots)
        if at:
            self._insert(run, at, request.tip, now)
        self._save_planned(run, at, True, now)
        self._own(run, -run.own_tokens)
        self._hold(run, None)

    def _hold(self, run: Running, node: Node | None) -> None:
        """The path to `node` is what `run` reads from now on, nothing if None."""
        tree, before = self.tree, run.held
        if node is not None:
            tree.lock(node)
        if before is not None:
            if run.copies:
                self._states_in_use -= Counter([before.id])  # which keeps what is above zero
            tree.unlock(before)
        run.held, run.copies = node, False

    def _admit(self, run: Running, end: int, now: float) -> None:
        """Make and take memory for a pass of `run` up to `end`."""
        takes = 1 + self.shape.buffers - run.slots
        self._states(self.shape.pass_states or takes, now)
        self._take(run, takes)
        tokens, page = end - run.computed, self.shape.page
        more = self.shape.paged(end) - self.shape.paged(run.computed)
        self._tokens(tokens + (page if page > 1 else 0), now)  # SGLang asks for a page more than it takes
        if more > self.free_tokens:
            raise ConfigError(f"give the server more KV than {self.shape.kv_tokens} tokens, a pass needs: {more}")
        self._own(run, more)

    def _has_spare(self) -> bool:
        """Whether states may be taken that nobody asked for."""
        return self.free_states > self.shape.states // 8 + 4

    def _split(self, upper: Node) -> None:
        """`upper` was split off the node below it."""

    def _donate(self, run: Running) -> None:
        """The tree gets a slot of `run`, which takes a free one in its place: nothing, where slots are only counted."""

    def _keep(self, run: Running, leaf: Node) -> None:
        """KV of `run` up to `leaf` is in the tree now."""
        if run.held is None or leaf.end > run.held.end:
            self._hold(run, leaf)
            self._own(run, self.shape.paged(run.computed) - leaf.end - run.own_tokens)

    def _attach(self, run: Running, leaf: Node, mark: Mark) -> None:
        """The state at `leaf` is one of `run`."""
        self.tree.attach(leaf, mark)

    def _take(self, run: Running, slots: int) -> None:
        run.slots += slots
        self._slots += slots

    def _own(self, run: Running, tokens: int) -> None:
        run.own_tokens += tokens
        self._own_tokens += tokens

    def _states(self, count: int, now: float) -> bool:
        """Evict until `count` slots are free; whether they are."""
        if count > self.free_states:
            self._evict(PoolKind.STATES, count - self.free_states, self.shape.states, now)
        return self.free_states >= count

    def _tokens(self, count: int, now: float) -> bool:
        """Evict until `count` tokens of KV are free; whether they are."""
        if count > self.free_tokens:
            self._evict(PoolKind.KV, count - self.free_tokens, self.shape.kv_tokens, now)
        return self.free_tokens >= count

    def _evict(self, pool: PoolKind, count: int, size: int, now: float, first: list[Node] | None = None) -> None:
        tree, ahead = self.tree, 0 if self._stock else size // AHEAD
        states = pool is PoolKind.STATES
        if states:
            self.decisions.fit(max(0, tree.states - count - ahead), tree.kv_tokens + self.free_tokens)
        else:
            self.decisions.fit(tree.states + self.free_states, max(0, tree.kv_tokens - count - ahead))
        before = tree.states if states else tree.kv_tokens
        while before - (tree.states if states else tree.kv_tokens) < count + ahead:
            node = first.pop(0) if first else self.victim(pool, now)
            if node is None:
                return
            self.evict(node)
