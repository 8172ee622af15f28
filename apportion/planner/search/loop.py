"""The search: candidates in order, then the neighbours of the best, within the budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Annotated, Any, Literal

from msgspec import Meta

from apportion.ir.errors import ApportionError, CapacityError, ConfigError, VerifyError
from apportion.ir.hashing import digest
from apportion.ir.request.policy import Recipe
from apportion.ir.tensors import PHASES
from apportion.planner.inner.groups import Ulysses
from apportion.planner.lower.inputs import Lowered, held_tokens
from apportion.planner.options import Count
from apportion.planner.pipeline import pipeline, placing, scheduling
from apportion.planner.pipeline.pipeline import PlanResult, SearchPass, UnsealedPlan
from apportion.planner.pipeline.placing import PlacedProblem
from apportion.planner.pipeline.report import compute_imbalance
from apportion.planner.pipeline.watch import SILENT, Stopwatch
from apportion.planner.problem import Problem
from apportion.planner.recipe.recipes import find_recipe, passes_of
from apportion.planner.schedule.rounds import Matchings
from apportion.planner.search.candidates import (
    EXACT,
    Candidate,
    in_more_rounds,
    last_resort,
    neighbours,
    portfolio,
    with_solvers,
)
from apportion.planner.search.price import Price, least_placed_us, least_scheduled_us, price
from apportion.planner.simulate.losses import whole_us
from apportion.planner.solvers.registry import find_solver
from apportion.planner.solvers.status import Limit

# Candidates whose times differ by at most the first share are compared by compute imbalance, if that differs by at
# least the second: a hundredth of a percent of simulated time does not justify loading a rank 2 % more.
SAME_TIME, MORE_EVEN = 1e-3, 5e-3
# Candidates within this share of the best are tried in more rounds before the search continues from one of them.
RIVAL = 0.01
# Default steps, enough for the important variants: 10 ms each on 8 ranks, 20 on 64, 40 to 80 on 256; four times as
# many gain 0.2 to 0.4 percentage points on 64.
STEPS = 10


@dataclass(frozen=True)
class Portfolio(SearchPass):
    """Tries recipes and keeps the one with the shortest simulated time, forward and backward, over all layers.

    candidates: initial recipes, by name or as data; "auto": see `portfolio`. improve: True to vary the best. inner:
    "none" excludes recipes that split heads. steps: largest number of tried recipes, "auto": 10 (policy.budget has
    priority); at least one is planned for any budget. solvers: True to try the best with exact solvers at the
    end, colouring by flows and placement by an integer program; they are optional dependencies, so a recipe must
    request them. Raises ConfigError, MissingDependencyError.
    """

    candidates: Literal["auto"] | Annotated[tuple[str | dict[str, Any], ...], Meta(min_length=1)] = "auto"
    inner: Literal["auto", "none"] = "auto"
    improve: bool = True
    steps: Count | Literal["auto"] = "auto"
    solvers: bool = False

    def __post_init__(self) -> None:
        path = "recipe.search.portfolio.candidates"
        for recipe in self.recipes():
            if recipe.step("search") is not None:
                raise ConfigError(path, recipe.name, "cannot be a search", "name recipes that plan")
            passes_of(recipe)

    def recipes(self) -> tuple[Recipe, ...]:
        """The recipes in `candidates`; none for "auto"."""
        return () if self.candidates == "auto" else tuple(map(find_recipe, self.candidates))

    def __call__(self, problem: Problem, watch: Stopwatch) -> PlanResult:
        """Returns the best candidate's plan, whose report has `search`. Raises ConfigError, CapacityError."""
        for kind, solver in EXACT if self.solvers else ():
            find_solver(kind, solver).load()
        search = _Search(problem, self, self.budget(problem))
        with watch("search"):
            search.run()
        return search.seal(watch)

    def budget(self, problem: Problem) -> int:
        """The largest number of steps."""
        if problem.policy.budget is not None:
            return problem.policy.budget
        if self.steps == "auto":
            return STEPS
        return self.steps

    def fixed_candidates(self, problem: Problem) -> tuple[list[Candidate], list[Candidate]]:
        """Candidates tried before the neighbours of the best, and candidates tried after them."""
        if self.candidates == "auto":
            return portfolio(problem, self.inner)
        return [Candidate(recipe) for recipe in self.recipes()], []


@dataclass(frozen=True)
class Trial:
    """One step of the search. price: None if it was not simulated, because it was refused, or because its lower bound
    `least_us`, over all layers, exceeds the best time. imbalance: of compute, max/mean - 1, if there is a price."""

    candidate: Candidate
    least_us: float = 0.0
    price: Price | None = None
    refusal: str | None = None
    imbalance: float = inf

    def record(self, layers: int) -> dict[str, Any]:
        """The trial's report entry: milliseconds per layer, averaged over layers."""
        price, bound_us = self.price, self.least_us / layers / 1e3
        return {
            "recipe": self.candidate.recipe.to_data(),
            "ms": None if price is None else price.layers_us / layers / 1e3,
            "least_ms": bound_us or None,
            "refused": self.refusal,
        }


@dataclass
class _Search:
    """State of a search: all trials, and the best with its unsealed plan."""

    problem: Problem
    settings: Portfolio
    steps: int
    trials: list[Trial] = field(default_factory=list)
    best: Trial | None = None
    fastest_us: float = inf
    draft: UnsealedPlan | None = None
    stopped: Limit | None = None
    _seen: set[str] = field(default_factory=set)
    _planned: set[str] = field(default_factory=set)
    _placed: dict[str, PlacedProblem] = field(default_factory=dict)

    @cached_property
    def _whole_us(self) -> dict[tuple[str, str], float]:
        """Microseconds of all bands of each kind and phase, each band as one task."""
        batch, model, cost = self.problem.batch, self.problem.model, self.problem.cost
        keys = [(kind, phase) for kind in batch.kinds for phase in PHASES]
        return {key: whole_us(batch, model, *key, cost) for key in keys}

    def run(self) -> None:
        """Tries the initial candidates, then, while that helps, the neighbours of the best, then the other candidates,
        and their neighbours if better; finally, beyond the budget, exact solvers if requested."""
        for candidates in self.settings.fixed_candidates(self.problem):
            if self._try_all(candidates) and self.settings.improve:
                self._improve()
        if self.settings.solvers and self.best is not None:
            limit, self.steps = self.stopped, self.steps + len(EXACT)
            self._try_all(with_solvers(self.best.candidate))
            self.stopped = limit

    def _improve(self) -> None:
        """Varies one parameter after another, repeatedly, until none helps."""
        self._try_all(self._rivals())
        index, failures = 0, 0
        while self.best is not None and self.stopped is None:
            moves = neighbours(self.best.candidate, self.problem, self.settings.inner)
            if failures == len(moves):
                break
            failures = 0 if self._try_all(moves[index % len(moves)], first=True) else failures + 1
            index += 1

    def _rivals(self) -> list[Candidate]:
        """The best candidate and its near-ties, each with more rounds, since that may change their order."""
        if self.best is None:
            return []
        near = [trial.candidate for trial in self.trials if _value(trial) <= _value(self.best) * (1 + RIVAL)]
        return [in_more_rounds(item) for item in near if item.rounds is not None] if len(near) > 1 else []

    def _try_all(self, candidates: Sequence[Candidate] | Iterator[Candidate], first: bool = False) -> bool:
        """Tries candidates; first: True to stop at the first better one. Returns True if there was one."""
        has_improved = False
        for candidate in candidates:
            if candidate.key in self._seen:
                continue
            self.stopped = self._limit()
            if self.stopped is not None:
                return has_improved
            is_better = self._try(candidate)
            has_improved = has_improved or is_better
            if is_better and first:
                return True
        return has_improved

    def _limit(self) -> Limit | None:
        """The limit that ends the search; None as long as there is no plan."""
        if self.best is None:
            return None
        return Limit.STEPS if len(self.trials) >= self.steps else None

    def _try(self, candidate: Candidate) -> bool:
        """Tries one candidate; returns True if it is the best so far."""
        self._seen.add(candidate.key)
        try:
            trial, draft = self._attempt(candidate)
        except VerifyError:
            raise
        except ApportionError as error:
            trial, draft = Trial(candidate, refusal=str(error)), None
        if trial is None:
            return False
        self.trials.append(trial)
        if draft is None:
            return False
        self.best, self.draft = trial, draft
        return True

    def _attempt(self, candidate: Candidate) -> tuple[Trial | None, UnsealedPlan | None]:
        """The trial, or None for a repeated one, and its unsealed plan if it is the best so far."""
        limit = self.fastest_us * (1 + SAME_TIME)
        placed = self._place(candidate)
        bound = least_placed_us(placed)
        if bound >= limit:
            return Trial(candidate, bound), None
        placed = replace(placed, passes=placing.usable_passes(self.problem, passes_of(candidate.recipe)))
        candidate, placed, lowered = _with_rounds(candidate, placed)
        if (cache_key := _plan_cache_key(placed)) in self._planned:
            return None, None
        self._planned.add(cache_key)
        lowered = lowered or scheduling.schedule(placed)
        bound = least_scheduled_us(placed, lowered)
        if bound >= limit:
            return Trial(candidate, bound), None
        draft = pipeline.draft(placed, SILENT, lowered)
        _check_cap(self.problem, draft)
        bound, result = price(draft.plan(), self.problem, self._whole_us, limit)
        if result is None:
            return Trial(candidate, bound), None
        imbalance = compute_imbalance(self.problem, draft.lowered, draft.layouts)
        trial = Trial(candidate, bound, result, imbalance=imbalance)
        self.fastest_us = min(self.fastest_us, result.layers_us)
        return trial, draft if self._is_better(trial) else None

    def _is_better(self, trial: Trial) -> bool:
        """True if, within the tolerance of the shortest time, the trial is more even than the best one, or about as
        even and faster."""
        limit = self.fastest_us * (1 + SAME_TIME)
        if self.best is None or _value(self.best) > limit:
            return True
        if _value(trial) > limit:
            return False
        more_even = self.best.imbalance - trial.imbalance
        return more_even >= MORE_EVEN or (more_even > -MORE_EVEN and _value(trial) < _value(self.best))

    def _place(self, candidate: Candidate) -> PlacedProblem:
        if candidate.placement_key not in self._placed:
            placed = placing.place(self.problem, passes_of(candidate.recipe), SILENT)
            self._placed[candidate.placement_key] = placed
        return self._placed[candidate.placement_key]

    def seal(self, watch: Stopwatch) -> PlanResult:
        """Seals the best plan; if a plan breaks a limit of the policy, it is refused and the next best is used."""
        for trial, draft in self._drafts():
            try:
                record = self._record(trial)
                return PlanResult(pipeline.seal(draft, watch, record), draft.placed, record)
            except CapacityError as error:
                self.trials[self.trials.index(trial)] = replace(trial, refusal=str(error))
        reasons = "; ".join(f"{trial.candidate.recipe.name}: {trial.refusal}" for trial in self.trials)
        raise CapacityError(f"none of the {len(self.trials)} candidates can be planned: {reasons}")

    def _drafts(self) -> Iterator[tuple[Trial, UnsealedPlan]]:
        """Unsealed plans, best first; the fallback comes last, and its errors are raised."""
        if self.best is not None and self.draft is not None:
            yield self.best, self.draft
        others = [trial for trial in self.trials if trial.price is not None and trial is not self.best]
        candidates = [trial.candidate for trial in sorted(others, key=_value)]
        if self.settings.candidates == "auto":
            candidates.append(last_resort())
        self._planned.clear()
        for candidate in candidates:
            self.best, self.fastest_us = None, inf  # each is planned separately
            trial, draft = self._attempt(candidate)
            if trial is not None and draft is not None:
                self.trials.append(trial)
                yield trial, draft

    def _record(self, best: Trial) -> dict[str, Any]:
        """The report entry of the search; milliseconds per layer, averaged over layers."""
        assert best.price is not None
        layers, result = self.problem.layer_count, best.price
        return {
            "recipe": best.candidate.recipe.to_data(),
            "forward_ms": result.forward_ms,
            "backward_ms": result.backward_ms,
            "ms": result.layers_us / layers / 1e3,
            "ideal_ms": result.ideal_us / layers / 1e3,
            "attainable_ms": result.attainable_us / layers / 1e3,
            "gap": result.layers_us / result.ideal_us - 1 if result.ideal_us else 0.0,
            "stopped": None if self.stopped is None else str(self.stopped),
            "steps": len(self.trials),
            "most_steps": self.steps,
            "tried": [trial.record(layers) for trial in self.trials],
            "untried": self._untried_candidates(),
        }

    def _untried_candidates(self) -> list[str]:
        """Candidates not reached by the search."""
        first, others = self.settings.fixed_candidates(self.problem)
        return [candidate.recipe.name for candidate in (*first, *others) if candidate.key not in self._seen]


def _plan_cache_key(placed: PlacedProblem) -> str:
    """Plan cache key: equal for equal homes and passes after placement; `route` and `schedule` do not count if all
    ranks are one group that splits the heads of all kinds, since they then move nothing."""
    placement, passes, lone = placed.placement, placed.passes, placed.lone
    if placement.execution is not None:
        return repr(passes)
    lone_bytes = b"" if lone is None else lone.index.tobytes() + lone.home.tobytes()
    homes = digest(placement.starts.tobytes() + placement.home.tobytes() + lone_bytes)
    heads = replace(passes.inner, lone=None) if isinstance(passes.inner, Ulysses) else passes.inner
    is_split = len(placed.groups) > 1 or not placing.splits_all(passes, placed.problem)
    transfer_passes = (passes.route, passes.schedule) if is_split else ()
    return f"{homes.hex()} {(heads, *transfer_passes, passes.reshuffle, passes.remap)!r}"


def _value(trial: Trial) -> float:
    return inf if trial.price is None else trial.price.layers_us


def _with_rounds(
    candidate: Candidate, placed: PlacedProblem
) -> tuple[Candidate, PlacedProblem, Lowered | None]:
    """Sets `coalesce` for about the candidate's number of rounds. Also returns the schedule computed on the way, if it
    has this `coalesce`."""
    schedule = placed.passes.schedule
    if candidate.rounds is None or not isinstance(schedule, Matchings):
        return candidate, placed, None
    single = replace(placed, passes=replace(placed.passes, schedule=replace(schedule, coalesce=1)))
    lowered = scheduling.schedule(single)
    slots = max(item.schedule.slots for item in lowered.values())
    coalesce = max(1, -(-slots // candidate.rounds))
    adjusted = candidate.with_parameter("schedule", "coalesce", coalesce)
    chosen_passes = replace(placed.passes, schedule=replace(schedule, coalesce=coalesce))
    return adjusted, replace(placed, passes=chosen_passes), lowered if coalesce == 1 else None


def _check_cap(problem: Problem, draft: UnsealedPlan) -> None:
    """Raises CapacityError if the plan of a place pass without a token cap exceeds the default caps."""
    if not draft.placed.passes.place.is_uncapped:
        return
    tokens, caps = held_tokens(draft.lowered), problem.token_caps
    rank = int((tokens / caps).argmax())
    if tokens[rank] > caps[rank]:
        raise CapacityError(f"the fullest rank would hold {tokens[rank]} tokens, but the cap is {caps[rank]}")
