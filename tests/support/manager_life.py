"""A life of random steps: everything that a scheduler may ask of a manager, in any order."""

from __future__ import annotations

import random

from support.manager_world import Engine, Running

from lightcache.errors import LeaseLost, WaitTimeout
from lightcache.manager import MultimodalItem, Prompt, RequestOptions

WEIGHTS = {
    "begin": 4.0,
    "branch": 1.0,
    "compute": 10.0,
    "end": 3.0,
    "abort": 1.0,
    "finish": 4.0,
    "fail": 1.0,
    "plan": 2.0,
    "take": 1.0,
    "demote": 1.0,
    "update": 0.3,
    "poll": 2.0,
    "protect": 0.3,
    "unprotect": 0.6,
    "drop": 0.5,
    "pause": 0.5,
    "resume": 1.5,
    "skip_load": 0.3,
    "evict": 0.3,
}
TIERS = (
    frozenset({"device", "host", "storage"}),
    frozenset({"device"}),
    frozenset({"host"}),
    frozenset({"host", "storage"}),
)


class Life:
    """Steps of one engine. What it knows are prompts that somebody had before."""

    def __init__(self, engine: Engine, seed: int, *, without: tuple[str, ...] = ()) -> None:
        """Nothing has happened.

        Args:
            without: steps that it never takes.
        """
        self.engine, self.random = engine, random.Random(seed)
        self.known = [Prompt(self.tokens(30))]
        self.planned: dict[int, tuple[Prompt, RequestOptions]] = {}
        self.kept: list[Prompt] = []
        self.numbers = iter(range(1 << 30))
        self.steps = [name for name in WEIGHTS if name not in without]

    def tokens(self, n: int) -> list[int]:
        """Few different ones, so that prefixes meet."""
        return [self.random.randrange(50) for _ in range(n)]

    def prompt(self, base: Prompt | None = None) -> Prompt:
        """The beginning of one that was there, with another end."""
        choose = self.random
        base = base or choose.choice(self.known)
        if choose.random() < 0.15:
            return self.remember(self.other_items(base))
        cut = choose.randrange(len(base) + 1)
        while (item := base.cut_item(cut)) is not None:
            cut = item.start
        tokens = [*base.tokens[:cut].tolist(), *self.tokens(choose.randrange(1, 16))]
        items = [each for each in base.items if each.end <= cut]
        if choose.random() < 0.3 and cut < len(tokens):
            begin = choose.randrange(cut, len(tokens))
            end = choose.randrange(begin + 1, len(tokens) + 1)
            # One or two, side by side.
            middle = choose.randrange(begin + 1, end + 1)
            for first, last in ((begin, middle), (middle, end)):
                if first < last:
                    items.append(MultimodalItem(first, last, bytes([choose.randrange(3)])))
        tenant = base.tenant if cut else choose.choice(["", "", "t"])
        return self.remember(Prompt(tokens, items=items, tenant=tenant))

    def other_items(self, base: Prompt) -> Prompt:
        """The same tokens, and what stands for them is another."""
        items = [
            MultimodalItem(each.start, each.end, bytes([each.digest[0] ^ 1])) for each in base.items
        ]
        return Prompt(base.tokens, items=items, tenant=base.tenant)

    def remember(self, prompt: Prompt) -> Prompt:
        """It may be asked for again."""
        self.known = [*self.known[-11:], prompt]
        return prompt

    def options(self) -> RequestOptions:
        """Mostly none."""
        choose = self.random
        if choose.random() < 0.7:
            return RequestOptions()
        return RequestOptions(
            read=choose.random() < 0.8,
            write=choose.random() < 0.8,
            tiers=choose.choice(TIERS),
            output=choose.random() < 0.5,
            priority=choose.randrange(-1, 2),
        )

    def step(self) -> None:
        """One thing that a scheduler does."""
        name = self.random.choices(self.steps, [WEIGHTS[each] for each in self.steps])[0]
        getattr(self, name)()
        self.engine.manager.poll()

    def _one(self) -> int | None:
        running = list(self.engine.running)
        return self.random.choice(running) if running else None

    def begin(self) -> None:
        """A request; the same prompt twice now and then."""
        if len(self.engine.running) < 5:
            known = self.random.choice(self.known)
            prompt = known if self.random.random() < 0.2 else self.prompt()
            self.engine.begin(next(self.numbers), prompt, self.options())

    def branch(self) -> None:
        """A request that goes on from what another is just computing."""
        one = self._one()
        if one is not None and len(self.engine.running) < 5:
            self.engine.begin(next(self.numbers), self.prompt(self._sequence(one)), self.options())

    def _sequence(self, request: int) -> Prompt:
        one = self.engine.running[request]
        return Prompt(one.tokens, items=one.prompt.items, tenant=one.prompt.tenant)

    def compute(self) -> None:
        """A chunk of the prompt, or a token."""
        request = self._one()
        if request is None:
            return
        one: Running = self.engine.running[request]
        left = len(one.tokens) - one.computed
        count = self.random.randrange(1, left + 1) if left > 0 else 1
        self.engine.compute(request, count, self.tokens(1))
        if one.computed == len(one.tokens):
            self.remember(self._sequence(request))

    def end(self, publish: bool = True) -> None:
        """A request is over."""
        request = self._one()
        if request is not None:
            self.engine.end(request, publish=publish)

    def abort(self) -> None:
        """It is not, and goes. While transfers are paused, its own are cancelled."""
        self.end(publish=False)

    def finish(self) -> None:
        """Some copies happen, and whether the next ones happen at once."""
        self.engine.backend.at_once = self.random.random() < 0.3
        self.engine.backend.finish(self.random.randrange(4))

    def fail(self) -> None:
        """The next copy fails, or does not."""
        self.engine.backend.fail_next = self.random.randrange(2)

    def plan(self) -> None:
        """Look, and perhaps take it much later."""
        request, prompt, options = next(self.numbers), self.prompt(), self.options()
        self.engine.manager.plan(request, prompt, options=options)
        if self.random.random() < 0.4:
            self.planned[request] = prompt, options
        else:
            self.engine.manager.cancel(request)

    def take(self) -> None:
        """Begin what was planned, whatever has happened since."""
        if self.planned and len(self.engine.running) < 5:
            request = self.random.choice(list(self.planned))
            prompt, options = self.planned.pop(request)
            try:
                self.engine.begin(request, prompt, options, planned=True)
            except LeaseLost:
                self.engine.manager.cancel(request)

    def demote(self) -> None:
        """Write back."""
        self.engine.manager.demote(self.random.randrange(1, 6))

    def update(self) -> None:
        """Other weights."""
        self.engine.update(self.engine.weights + 1)
        self.kept.clear()

    def poll(self) -> None:
        """Nothing else."""

    def protect(self) -> None:
        """For good, or until it is undone."""
        if len(self.kept) < 2:
            self.kept.append(self.random.choice(self.known))
            self.engine.manager.protect(self.kept[-1])

    def unprotect(self) -> None:
        """Undo it."""
        if self.kept:
            self.engine.manager.unprotect(self.kept.pop(0))

    def drop(self) -> None:
        """A branch."""
        prompt = self.random.choice(self.known)
        self.engine.manager.drop(prompt, self.random.randrange(len(prompt) + 1))

    def pause(self) -> None:
        """Copies queue."""
        try:
            self.engine.manager.pause(0)
        except WaitTimeout:
            assert self.engine.manager.in_flight()

    def resume(self) -> None:
        """They begin."""
        self.engine.manager.resume()

    def skip_load(self) -> None:
        """The next request that could load something does not."""
        self.engine.skip_load_next = True

    def evict(self) -> None:
        """Make room ahead of need."""
        if self.engine.blocks is None:
            self.engine.manager.can_allocate(self.random.randrange(6), evict=True)

    def check(self) -> None:
        """What anybody might find is right."""
        for prompt in self.known:
            self.engine.check_host(prompt)
            self.engine.check_device(prompt)

    def over(self) -> None:
        """Undo what outlives requests."""
        while self.kept:
            self.unprotect()
        self.engine.manager.resume()
        for request in self.planned:
            self.engine.manager.cancel(request)
        self.planned.clear()


__all__ = ["Life"]
