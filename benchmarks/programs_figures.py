"""The tables of ``docs/evidence/programs.md`` from the records of ``programs-study``."""

import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from prunus.lab.study.tables import markdown_table
from prunus.trained.problems import wilson

from .benchmark import Row
from .figures import NOT_MEASURED, ModelFigures, joined, origins_of, records_by_model
from .programs_study import ARMS, BATCHES, WHAT

MODEL = "Qwen2.5-Coder-1.5B-Instruct"
SAME = ("length", "held_out", "num_problems", "max_new_tokens", "dtype", "samples")  # in all records of a model
HEADINGS = ["arm", "pass@1 (95 % interval)", "of dense", "goal", "outcome", "Python", "prose", "MB on disk"]
HEADINGS += ["MB in memory", *(f"{way}, {batch}" for way in ("generate", "decoder") for batch in BATCHES)]
FEW = 4  # reasons of failure that are listed


@dataclass(frozen=True)
class ProgramsFigures:
    """All records of one model; of several figures of one arm, measure and seed the newest counts."""

    figures: ModelFigures  # a way is an arm, a level a measure

    def of(self, arm: str, measure: str) -> list[Row]:
        return [*self.figures.rows.get((arm, measure), {}).values()]

    def mean(self, arm: str, measure: str, key: str = "value") -> float | None:
        values = [row[key] for row in self.of(arm, measure)]
        return statistics.fmean(values) if values else None

    def share(self, arm: str) -> float | None:
        """Of the dense model's pass@1."""
        mine, dense = self.mean(arm, "pass@1"), self.mean("dense", "pass@1")
        return mine / dense if mine is not None and dense else None

    # As text

    def solved(self, arm: str) -> str:
        """The mean over draws; the interval is that of one draw, since all have the same problems."""
        rows = self.of(arm, "pass@1")
        if not rows:
            return NOT_MEASURED
        mean, total = statistics.fmean(row["value"] for row in rows), rows[0]["problems"]
        low, high = wilson(mean * total, total)
        draws = [f"{row['value']:.3f}" for row in rows]
        several = f"; draws {', '.join(draws)}" if len(draws) > 1 else ""
        return f"{mean:.3f} ({low:.3f} to {high:.3f}{several})"

    def outcome(self, arm: str) -> list[str]:
        share, goal = self.share(arm), ARMS[arm].goal
        if arm == "dense" or goal is None:
            return ["" if share is None else f"{share:.2f}", "", ""]
        if share is None:
            return ["", f"{goal:g}", NOT_MEASURED]
        return [f"{share:.2f}", f"{goal:g}", "met" if share >= goal else f"**missed by {goal - share:.2f}**"]

    def line(self, arm: str) -> list[str]:
        cells = [self.number(self.mean(arm, measure)) for measure in ("python", "prose")]
        sizes = [self.mean(arm, "bytes", key) for key in ("value", "memory")]
        cells += ["" if size is None else f"{size / 1e6:,.0f}" for size in sizes]
        for way in ("generate", "decoder"):
            for batch in BATCHES:
                speeds = [row["tokens_s"].get(f"{way} {batch}") for row in self.of(arm, "speed")]
                known = [speed for speed in speeds if speed is not None]
                cells.append(f"{statistics.fmean(known):,.0f}" if known else "")
        return [ARMS[arm].title, self.solved(arm), *self.outcome(arm), *cells]

    def number(self, value: float | None) -> str:
        return "" if value is None else f"{value:.3f}" if value < 10 else f"{value:,.1f}"

    def failures(self, arm: str) -> list[str]:
        """Why programs failed, of all draws."""
        counts = sum((Counter(row["failures"]) for row in self.of(arm, "pass@1")), Counter[str]())
        return [ARMS[arm].title, ", ".join(f"{name} {num}" for name, num in counts.most_common(FEW))]

    def section(self) -> str:
        settings = self.figures.settings
        learned = {row["steps"] for row in self.figures.rows_of() if row["steps"]}
        about = f"{settings['about']}. " if settings["about"] else ""
        about += f"Calibrated on {settings['samples']} windows of {settings['length']} tokens; perplexity on at most "
        about += f"{settings['held_out']} held-out windows; answers of at most {settings['max_new_tokens']} tokens. "
        about += f"What learns takes {joined(learned, ',')} steps." if learned else "Nothing has learned yet."
        why = [self.failures(arm) for arm in ARMS if self.of(arm, "pass@1")]
        tables = [self.table(), *([markdown_table(["arm", "why programs failed"], why, words=(1,))] if why else [])]
        return "\n\n".join([f"### {self.figures.name}", about, origins_of(self.figures.records), *tables]) + "\n"

    def table(self) -> str:
        """A line for each arm; of the model with goals also those that were not measured."""
        wanted = {arm for arm, about in ARMS.items() if about.goal is not None and self.figures.name == MODEL}
        measured = {arm for arm, _ in self.figures.rows}
        arms = [arm for arm in ARMS if arm in wanted | measured]
        return markdown_table(HEADINGS, [self.line(arm) for arm in arms], words=(4,))


def parts(folder: Path) -> dict[str, str]:
    """What the page shows between its marks."""
    by_name = {MODEL: []} | records_by_model(folder, WHAT, SAME)
    drawn = [ProgramsFigures(ModelFigures(name, records)) for name, records in by_name.items()]
    empty = f"### {MODEL}\n\n{drawn[0].table()}\n"
    return {"table": "\n".join(one.section() if one.figures.records else empty for one in drawn)}
