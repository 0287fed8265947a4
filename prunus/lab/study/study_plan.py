"""A plan: one base run, its arms, and which are run how; runs with equal keys are the same computation."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from ...score import SCORES
from ..run import DECAY, Run, check_field
from ..schema import STUDY, check
from .arms import CONTROLS, Arm, slug, typed, with_controls

FORMAT = "prunus-study-1"
PRUNING = "sparsity schedule begin end every allocate eps exponent regrow regrow_by rate_power".split()
UNREAD_IF_DENSE = "eps exponent regrow regrow_by rate_power replay".split()  # fields that a dense run must not set
IRRELEVANT = "out device save_every log_every track eval_every data validation".split()  # to what is computed
NOT_SHARED = "out device save_every log_every track seed sparsity data validation".split()  # fields outside the hash


def shared_fields(base: Run) -> dict[str, Any]:
    values = {name: value for name, value in base.to_json().items() if name not in NOT_SHARED}
    if base.lr_schedule == "wsd" and base.decay is None:
        values["decay"] = DECAY
    return values


def num_examples(run: Run) -> int:
    return run.total_steps * run.batch * run.accumulate


@lru_cache(maxsize=4096)
def key_of(run: Run) -> str:
    """Equal for runs that compute the same, bit for bit."""
    return digest(canonical(run))


def dense_of(run: Run) -> Run:
    """The dense run that is equal in all but pruning."""
    unread: dict[str, Any] = {name: getattr(Run, name) for name in UNREAD_IF_DENSE}
    return replace(run, score="none", sparsity=0.0, **unread)


def canonical(run: Run) -> dict[str, Any]:
    """The fields that decide what is computed, each in one form.

    Scores too: bitter1 is magnitude, bitter4 is bitter3. All weights of a run take the same steps, so that no bias is
    corrected: bitter8 is bitter3, fisher's 1/4 bitter7.
    """
    values = {name: value for name, value in run.to_json().items() if name not in IRRELEVANT}
    values |= {"steps": run.total_steps, "budget_scale": 1.0, "warmup": run.step_of(run.warmup)}
    if run.lr_schedule == "wsd":
        values["decay"] = run.decay_steps
    if run.score == "none":
        return {name: value for name, value in values.items() if name not in PRUNING}
    score, options = SCORES[run.score].canonical({"eps": run.eps, "q": run.exponent})
    values |= {"score": score, "eps": options.get("eps"), "exponent": options.get("q")}
    values |= {"begin": run.step_of(run.begin), "end": run.step_of(run.end), "every": run.event_period}
    unread = {"constant": ("begin", "end", "every"), "one_shot": ("end", "every")}.get(run.schedule, ())
    if not values.get("regrow"):
        unread += ("regrow", "regrow_by")
    return {name: value for name, value in values.items() if name not in unread}


def digest(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def data_digests(base: Run) -> dict[str, str]:
    files = {"data": base.data} | ({"validation": str(base.validation)} if base.validation else {})
    return {name: _digest_of(spec) for name, spec in files.items()}


def _digest_of(spec: str) -> str:
    if spec == "digits":
        return spec
    if spec == "stdlib":
        from ..data.datasets import read_stdlib

        return sha256(b"".join(part.tobytes() for part in read_stdlib())).hexdigest()[:16]
    path, total = Path(spec), sha256()
    if not path.exists():
        raise ValueError(f"{spec} is neither a file nor a folder; pass the data's place as --data")
    for file in filter(Path.is_file, sorted(path.iterdir()) if path.is_dir() else [path]):
        with file.open("rb") as opened:
            while block := opened.read(1 << 24):
                total.update(block)
    return total.hexdigest()[:16]


@dataclass(frozen=True, order=True)
class Cell:
    arm: str
    sparsity: float
    seed: int

    @property
    def folder(self) -> str:
        return f"{slug(self.arm)}-{self.sparsity:.12g}-s{self.seed}"


@dataclass(frozen=True)
class StudyPlan:
    """What a study holds; ``data`` are digests of the files, whose paths may differ from machine to machine."""

    base: Run
    arms: tuple[Arm, ...]
    cells: tuple[Cell, ...]
    data: Mapping[str, str]

    def __post_init__(self) -> None:
        for cell in self.cells:
            self.run_of(cell)

    @cached_property
    def arm(self) -> dict[str, Arm]:
        return {arm.name: arm for arm in self.arms}

    def run_of(self, cell: Cell) -> Run:
        """The run of a cell; an arm that is not comparable with the base is refused."""
        arm = self.arm[cell.arm]
        try:
            run = replace(self.base, **arm.changes, sparsity=cell.sparsity, seed=cell.seed)
        except ValueError as error:
            raise ValueError(f"arm {arm.name} ({arm}): {error}") from None
        own, shared = (one.steps * one.batch * one.accumulate for one in (run, self.base))
        if own != shared:
            a_step = run.batch * run.accumulate
            mend = f"a longer budget is given by budget_scale={own / shared:g}"
            if a_step != self.base.batch * self.base.accumulate:
                mend = f"with {a_step} a step it needs steps={shared / a_step:g}"
            raise ValueError(f"arm {arm.name} ({arm}) reads {own:,} examples, but the base reads {shared:,}; {mend}")
        return run

    @cached_property
    def hash(self) -> str:
        return digest({"base": shared_fields(self.base), "data": dict(self.data)})

    def ordered(self) -> list[Cell]:
        """Cells as they are run: one seed of everything, those that replay another last, then the next."""
        place = {arm.name: ("replay" in arm.changes, number) for number, arm in enumerate(self.arms)}
        return sorted(self.cells, key=lambda cell: (cell.seed, place[cell.arm], cell.sparsity))

    @cached_property
    def owners(self) -> dict[Cell, Cell]:
        """For each cell the first cell that is the same computation; usually itself."""
        first: dict[str, Cell] = {}
        return {cell: first.setdefault(key_of(self.run_of(cell)), cell) for cell in self.ordered()}

    @cached_property
    def _cells_by_key(self) -> dict[str, Cell]:
        return {key_of(self.run_of(cell)): cell for cell in self.owners.values()}

    def replayed_by(self, cell: Cell) -> Cell | None:
        """The run whose learning rates a cell replays, if the study holds it."""
        name = self.run_of(cell).replayed
        return next((owner for owner in self.owners.values() if owner.folder == name), None)

    def dense_for(self, cell: Cell) -> Cell | None:
        """The dense run that is equal to a cell's in all but pruning, if the study holds one."""
        return self._cells_by_key.get(key_of(dense_of(self.run_of(cell))))

    def magnitude_for(self, cell: Cell) -> Cell | None:
        """The run that is equal to a cell's in all but that it prunes by magnitude, if the study holds one."""
        if not cell.sparsity:
            return None
        return self._cells_by_key.get(key_of(replace(self.run_of(cell), score="magnitude", eps=None, exponent=None)))

    def overlapped(self, cell: Cell) -> Cell | None:
        """The run to compare a cell's masks with: magnitude of the same recipe, else magnitude trained alike."""
        if not cell.sparsity:
            return None
        alike = self.magnitude_for(cell)
        if alike and alike != self.owners[cell]:
            return alike
        plain = self.owners.get(Cell("magnitude", cell.sparsity, cell.seed))
        same = plain and key_of(dense_of(self.run_of(plain))) == key_of(dense_of(self.run_of(cell)))
        return plain if same else None

    def against(self, cell: Cell) -> str:
        """The arm that a cell is compared with: as its arm says, else magnitude of the same recipe if there is."""
        if not cell.sparsity:
            return "dense"
        alike = self.magnitude_for(cell)
        own = alike.arm if alike and alike != self.owners[cell] else "magnitude"
        return self.arm[cell.arm].against or own

    def to_json(self) -> dict[str, Any]:
        cells = {arm.name: sorted([c.sparsity, c.seed] for c in self.cells if c.arm == arm.name) for arm in self.arms}
        return {
            "format": FORMAT,
            "hash": self.hash,
            "base": self.base.to_json(),
            "data": dict(self.data),
            "sparsities": sorted({cell.sparsity for cell in self.cells} - {0.0}),
            "seeds": sorted({cell.seed for cell in self.cells}),
            "arms": [arm.to_json() | {"cells": cells[arm.name]} for arm in self.arms],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "StudyPlan":
        check(values, STUDY, "", "it")
        arms, cells = [], []
        for arm in values["arms"]:
            name, where = arm["name"], f"arm {arm['name']}"
            changes = {field: typed(field, value, where) for field, value in arm["changes"].items()}
            arms.append(Arm(name, changes, arm["against"]))
            for sparsity, seed in arm["cells"]:
                check_field("sparsity", sparsity, where)
                check_field("seed", seed, where)
                cells.append(Cell(name, sparsity, seed))
        return cls(Run.from_json(values["base"]), with_controls(arms), tuple(cells), dict(values["data"]))


def make_plan(base: Run, arms: Iterable[Arm], sparsities: Iterable[float], seeds: Iterable[int]) -> StudyPlan:
    """Every arm at every sparsity with every seed, dense once a seed, and the controls always."""
    every, sparsities = with_controls(arms), list(sparsities)
    for sparsity in sparsities:
        if not 0 < sparsity < 1:
            raise ValueError(f"a study's sparsities must lie between 0 and 1, got {sparsity}; dense is always included")
    cells = dict.fromkeys(
        Cell(arm.name, 0.0 if arm.changes.get("score", base.score) == "none" else sparsity, seed)
        for arm in every
        for sparsity in sparsities
        for seed in seeds
    )
    return StudyPlan(base, every, tuple(cells), data_digests(base))


def only(plan: StudyPlan, names: Iterable[str]) -> StudyPlan:
    """The cells of these arms and of the controls, of arms that are the same, and of runs that they replay."""
    wanted = [*names, *(arm.name for arm in CONTROLS)]
    if unknown := [name for name in wanted if name not in plan.arm]:
        raise ValueError(f"there is no arm {unknown[0]!r}; the arms are {', '.join(plan.arm)}")
    runs: set[Cell | None] = {plan.owners[cell] for cell in plan.cells if cell.arm in wanted}
    runs |= {plan.replayed_by(cell) for cell in plan.cells if cell.arm in wanted}
    return replace(plan, cells=tuple(cell for cell in plan.cells if plan.owners[cell] in runs))


def extended(old: StudyPlan, new: StudyPlan, where: Path) -> StudyPlan:
    """Both plans together; ValueError if they differ in something that all arms share."""
    if new.base.every is None:  # not said: a study keeps what it began with
        new = replace(new, base=replace(new.base, every=old.base.every))
    before, after = shared_fields(old.base), shared_fields(new.base)
    for name, value in before.items():
        if value != after[name]:
            raise ValueError(
                f"the study in {where} has {name} = {value}, not {after[name]}; all arms share it: choose another "
                "folder, or make it an arm"
            )
    for name in sorted(old.data.keys() | new.data.keys()):
        if old.data.get(name) != new.data.get(name):
            raise ValueError(f"the study in {where} was made with another {name}: the bytes of the file differ")
    arms = {arm.name: arm for arm in old.arms}
    for arm in new.arms:
        same = arms.setdefault(arm.name, arm)
        if dict(same.changes) != dict(arm.changes):
            raise ValueError(f"arm {arm.name} of {where} is {same}, not {arm}; give it another name")
        arms[arm.name] = arm
    return StudyPlan(new.base, with_controls(arms.values()), tuple(dict.fromkeys(old.cells + new.cells)), new.data)
