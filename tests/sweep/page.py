"""The support matrix as a page, from the record of a sweep."""

from collections.abc import Mapping
from typing import Any

YES = "yes"
ONE_SHOT = ("magnitude", "wanda", "fisher")
SHRINKS = ("neurons", "heads", "layers")
CHECKS = ("training", *ONE_SHOT, "repair", "export", "doctor", "sparse run", *SHRINKS)
COLUMNS = ("training", "one-shot", "repair", "export", "doctor", "sparse run", *SHRINKS)
HEAD = """\
# Which models are supported

{num} families of transformers, each built tiny and random from its configuration, went through these checks with
transformers {newest} and torch {torch}. A cell says *yes* where the check ran and held, *part* where some weights are
treated differently, and *no* where it failed; the reasons stand below the table. `make sweep` runs all of it again.

- **training**: `Pruner` with AdamW, 20 steps to 60 %: exactly `round(0.6 N)` weights are pruned and zero.
- **one-shot**: `prune` by magnitude, WANDA and fisher to 50 %; the counts are right, and `undo_` restores every bit.
- **repair**: `prune` with its solver to 50 % of each weight; the errors of the outputs fall, and `undo_` restores.
- **export**: `save_model`, `save_pretrained`, `prunus export --check`; what is loaded is equal, and so are its outputs.
- **doctor**: `prunus doctor` finds the folders healthy.
- **sparse run**: `sparsify_`, then the same outputs.
- **neurons**, **heads**: a quarter of them cut, different ones in each layer; the outputs are those of the model in
  which nothing reads them, and those of the folder that plain `from_pretrained` loads.
- **layers**: a model of five layers loses one; plain `from_pretrained` loads the folder, with equal outputs.

The last columns say which share of all parameters is prunable, and which other matrices stay dense by default, with
their number. Norms and biases are never pruned.
"""


def page(record: Mapping[str, Any]) -> str:
    """The newest version's table, with what differs in older ones in a column of its own."""
    newest, *others = sorted(record, key=version_key, reverse=True)
    families = record[newest]["families"]
    lines = [HEAD.format(num=len(families), newest=newest, torch=record[newest]["torch"])]
    titles = ["family", "class", *COLUMNS, *(f"with {version}" for version in others), "prunable", "stays dense"]
    lines += [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, found in families.items():
        older = [_compared(found, record[version]["families"].get(name, {})) for version in others]
        row = [name, f"`{found['class']}`", *(cell(found, column) for column in COLUMNS), *older]
        lines.append(f"| {' | '.join([*row, *_dense(found)])} |")
    for version in (newest, *others):
        lines += ["", f"## Reasons, with transformers {version}", ""]
        known = {} if version == newest else families
        lines += [
            f"- {name}, {check}: {reason}"
            for name, found in record[version]["families"].items()
            for check, reason in _reasons(found)
            if known.get(name, {}).get(check) != reason
        ]
        if missing := [name for name, found in record[version]["families"].items() if found.get("missing")]:
            lines += ["", f"Not in this version: {', '.join(missing)}."]
    return "\n".join([*lines, ""])


def version_key(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def cell(found: Mapping[str, Any], column: str) -> str:
    if found.get("missing") or "not built" in found:
        return "–"
    texts = [found.get(check) for check in (ONE_SHOT if column == "one-shot" else (column,))]
    if None in texts:
        return "–"
    if not all(text.startswith(YES) for text in texts):
        return "no"
    return YES if all(text == YES for text in texts) else "part"


def _compared(newest: Mapping[str, Any], older: Mapping[str, Any]) -> str:
    """``same``, or the columns that differ."""
    if not older:
        return "not run"
    if older.get("missing"):
        return "not there"
    if "not built" in older:
        return "not built"
    checks = [column for column in COLUMNS if column == "one-shot" or column in older]
    cells = {column: (cell(newest, column), cell(older, column)) for column in checks}
    return "; ".join(f"{column} {now}" for column, (was, now) in cells.items() if was != now) or "same"


def _dense(found: Mapping[str, Any]) -> list[str]:
    if "parameters" not in found:
        return ["–", "–"]
    reasons = (f"{reason.partition(', not')[0]} {num}" for reason, num in found["dense"].items())
    return [f"{found['prunable'] / found['parameters']:.0%}", ", ".join(reasons) or "nothing"]


def _reasons(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    checks = [(check, found[check]) for check in CHECKS if found.get(check, YES) != YES]
    return [*checks, *([("not built", found["not built"])] if "not built" in found else [])]
