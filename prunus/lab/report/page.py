"""One HTML page that needs nothing beside it; its charts are drawn by plotly, whose script the page holds."""

import json
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...files.atomic import write_atomically
from .cells import ArmRow, Source, mean_of, read_source
from .comparison import memory_of, split_recipe
from .demo_page import DEMO_FILE, demo_page
from .model_pages import RECOVERY_FILE, pruned_page, recovered_page
from .numbers import count, duration, fixed, memory, number, percent, plain, short_percent, signed
from .panel import Page
from .records import RunRecord
from .sections import sections

if TYPE_CHECKING:
    from jinja2 import Template


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the page of a run, a study, the demo, a pruned or a recovered model in one step, and return where it is."""
    target = out or folder / "report.html"
    if target.is_dir():
        raise ValueError(f"{target} is a folder; give the name of the page too: {target / 'report.html'}")
    if (folder / DEMO_FILE).is_file():
        page = html_of(demo_page(folder))
    elif (folder / RECOVERY_FILE).is_file():
        page = html_of(recovered_page(folder))
    elif (folder / "result.json").is_file() and not (folder / "run.json").is_file():  # prunus prune wrote it
        page = html_of(pruned_page(folder))
    else:
        page = render(read_source(folder))
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, lambda file: file.write(page.encode(errors="replace")))  # JSON may hold a lone surrogate
    return target


def render(source: Source) -> str:
    parts = headline(source), lede(source), sections(source), figures(source), source.notes
    return html_of(Page(source.kind, source.title, *parts))


def html_of(page: Page) -> str:
    """The page as text; its policy allows no network and no script but its own two, by their digests."""
    panels = [panel for section in page.sections for panel in section.panels]
    data = [{"data": panel.traces, "layout": panel.layout, "height": panel.height} for panel in panels]
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")  # in a script element
    template, fixed = _template(has_charts=bool(panels))
    return template.render(page=page, data=text, **fixed)


@cache
def _template(has_charts: bool) -> "tuple[Template, dict[str, Any]]":
    files = [resources.files("prunus.lab.report").joinpath(name) for name in ("page.html", "style.css", "page.js")]
    html, style, own = (file.read_text(encoding="utf-8") for file in files)
    scripts: list[str] = []
    try:
        from jinja2 import Environment

        if has_charts:
            from plotly.offline import get_plotlyjs

            scripts = [_inline(get_plotlyjs()), _inline(own)]
    except ImportError as error:
        raise ValueError(f"a report needs {error.name}: pip install plotly jinja2") from None
    digests = " ".join(f"'sha256-{b64encode(sha256(s.encode()).digest()).decode()}'" for s in scripts) or "'none'"
    policy = f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; img-src data:; "
    policy += "base-uri 'none'; form-action 'none'"
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["together"] = _together
    return environment.from_string(html), {"style": style, "scripts": scripts, "policy": policy}


def _together(text: str) -> str:
    """No line break between a number and its unit."""
    return text.replace(" %", "\u00a0%").replace(" ± ", "\u00a0±\u00a0")


def _inline(script: str) -> str:
    """A script as it may stand in a page: nothing in it ends its element, and lines end as HTML has them."""
    return script.replace("\r\n", "\n").replace("\r", "\n").replace("</script", "<\\/script").replace("<!--", "<\\!--")


def headline(source: Source) -> str:
    """The finding, as one sentence."""
    if not source.is_comparison:
        return _of_run(source.record)
    if not any(row.mean is not None for row in source.rows):
        failed = sum(bool(cell.failure) for cell in source.cells)
        some = f"; {failed} failed" if failed else ""
        return f"{len(source.cells)} runs, none of which has ended{' yet' * (source.num_open > 0)}{some}"
    if not source.sparsities:
        return f"{len(source.cells)} dense runs"
    ended = [sparsity for sparsity in source.sparsities if _ended(source, sparsity)]
    if not ended:
        return f"{len(source.cells)} runs, of which only dense ones have ended yet"
    if clear := _of_verdicts(source, max(ended)):
        return clear
    rows, record = _sorted(source, max(ended)), source.record
    seeds = min(len(row.values) for row in rows)
    best = f"{'lowest' if record.is_language else 'highest'}: {_quality(rows[0].mean, record)}"
    often = "one seed" if seeds == 1 else f"{seeds} seeds"
    return f"At {short_percent(max(ended))} sparsity, {rows[0].arm} ended {best} ({often}, no interval)"


def _of_run(record: RunRecord) -> str:
    score, total_steps = record.run.score, record.run.total_steps
    name = "The dense run" if score == "none" else score
    if record.failure:
        return f"{name} failed at step {record.last_step:,} of {total_steps:,}"
    if record.result is None:
        last = record.evals[-1] if record.evals else {}
        so_far = f", {percent(last['sparsity'])} of the weights removed so far" if "sparsity" in last else ""
        return f"{name} at step {record.last_step:,} of {total_steps:,}{so_far}"
    if record.has_diverged:
        return f"{name} diverged: it ended with no finite quality"
    end = _quality(record.quality, record)
    if score == "none":
        return f"A dense run that ended at {end}"
    return f"{name} removed {short_percent(record.result['sparsity'])} of the prunable weights and ended at {end}"


def _quality(value: float | None, record: RunRecord) -> str:
    return f"perplexity {plain(value)}" if record.is_language else f"{plain(value)} % accuracy"


def _ended(source: Source, sparsity: float) -> list[ArmRow]:
    return [row for row in source.rows if row.sparsity == sparsity and row.mean is not None]


def _of_verdicts(source: Source, sparsity: float) -> str:
    """The best arm whose interval leaves magnitude out, or that there is none; empty without any interval."""
    rows = [r for r in _ended(source, sparsity) if r.half_width is not None and r.difference is not None]
    rows = [row for row in rows if row.arm not in ("random", row.against) and not row.mixed]
    if not rows:
        return ""
    at = f"At {short_percent(sparsity)} sparsity"
    unit = "perplexity" if source.record.is_language else "points of accuracy"
    gains = {row.arm: -source.record.metric.sign * (row.difference or 0) for row in rows}
    clear = [row for row in rows if row.verdict.startswith("better")]
    if clear:
        best = max(clear, key=lambda row: gains[row.arm])
        arm, other, recipe = split_recipe(best.arm, best.against)
        gain, half = (fixed(value, best.decimals) for value in (gains[best.arm], best.half_width))
        by = f"{gain} ± {half} {unit} over {len(best.values)} seeds"
        return f"{at}, {arm} beats {other} by {by}" + (f", both {recipe}" if recipe else "")
    names = "no arm" if len(rows) > 1 else rows[0].arm
    against = rows[0].against if len({row.against for row in rows}) == 1 else "its reference"
    verb = "is seen to beat" if len(rows) > 1 else "is not seen to beat"
    return f"{at}, {names} {verb} {against} with {min(len(row.values) for row in rows)} seeds"


def lede(source: Source) -> str:
    record, run = source.record, source.record.run
    model = run.model + (f" ({count(record.result['num_parameters'])} parameters)" if record.result else "")
    steps = run.total_steps
    budget = f"{count(steps * record.per_step)} {record.unit} in {steps:,} steps"
    data = run.data.rstrip("/").split("/")[-1]
    said = [f"{model} on {data}, {budget}."]
    if source.is_comparison:
        seeds = len({cell.seed for cell in source.cells})
        said.append(f"{len(source.arms)} arms, {len(source.cells)} runs, {seeds} seed{'s' * (seeds > 1)}.")
        if dense := source.row("dense", 0.0):
            said.append(f"Dense ends at {_quality(dense.mean, record)}.")
        best = []
        for row in [rows[0] for sparsity in source.sparsities if (rows := _sorted(source, sparsity))]:
            lost = "" if row.cost is None else f" ({signed(row.cost, row.decimals)} against {row.dense})"
            one = ", one seed" * (len(row.values) == 1)
            best.append(f"at {short_percent(row.sparsity)} {row.arm}{lost}{one}")
        if best:
            said.append(f"{'Lowest' if record.is_language else 'Highest'} {'; '.join(best)}.")
    if where := record.environment.get("machine"):
        said.append(f"Measured on {where}.")
    return " ".join(said)


def _sorted(source: Source, sparsity: float) -> list[ArmRow]:
    """Rows of a sparsity that have a mean, the best of the most seeds first; those of other budgets come behind."""

    def place(row: ArmRow) -> tuple[float, ...]:
        return row.budget != source.budget, row.budget, -len(row.values), source.record.metric.sign * (row.mean or 0)

    return sorted(_ended(source, sparsity), key=place)


def figures(source: Source) -> list[tuple[str, str]]:
    record, result = source.record, source.record.result or {}
    if source.is_comparison:
        return []
    seconds, done = result.get("seconds"), record.last_step * record.per_step
    evals = record.evals
    last = number(evals[-1]["eval"].get(record.metric.name)) if evals else None
    quality = "" if last is None else plain(last * record.metric.scale) + " %" * (not record.is_language)
    pruning = mean_of([event.get("seconds") for event in record.events])
    texts = {
        f"held-out {record.metric.name}": quality,
        "weights removed": percent(evals[-1].get("sparsity"), 2) if evals else "",
        f"{record.unit} read": count(done),
        "training time": duration(seconds) if seconds else "",
        f"{record.unit} per second": count(done / seconds) if seconds else "",
        "time of an event": f"{plain(pruning * 1e3, 3)} ms" if pruning else "",
        "peak memory": memory(memory_of(source.cells[0])) if memory_of(source.cells[0]) else "",
    }
    return [(name, text) for name, text in texts.items() if text]
