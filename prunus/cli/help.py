"""What ``prunus COMMAND --help`` prints: the usual options first, the others in groups."""

import contextlib
import io
import os
import re
import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

WIDEST = 100  # columns of a page
LEFT = 26  # columns of an option's name and values
USUAL, MORE = "the usual options", "more options"
# fields of a command by group; what no group names comes last
GROUPS = {
    "train": {
        USUAL: "data model steps batch lr score sparsity seed out resume",
        "what is trained": "width layers validation vocab-size context augment",
        "how it is pruned": "schedule begin end every allocate include exclude regrow regrow-by rate-power replay eps "
        "exponent",
        "how it learns": "optimizer spam lr-schedule min-lr decay warmup weight-decay beta1 beta2 clip accumulate "
        "budget-scale",
        "how it runs": "precision parallel compile device eval-every eval-size save-every log-every track",
    },
    "prune": {
        USUAL: "out text tokens batches sparsity score scope samples device layers",
        "calibration and held-out data": "eval-text eval-tokens eval-batches token-type start-token calibrate length "
        "eval-windows seed",
        "which weights, and how layers share the sparsity": "experts allocate include exclude",
        "repair": "no-repair targets damping tune",
        "gradient probe": "probe tau order reduction zero-gradient repair-probe",
        "what is written": "plot push private",
        "how it runs": "batch gguf-file dtype offload checkpointing profile",
    },
    "study": {
        USUAL: "base preset data scores sparsity seeds out dry-run devices time-limit",
        "what is compared": "arm only set validation",
        "what is written": "save-every keep-checkpoints slim page",
    },
}
GROUPS["profile"] = GROUPS["train"] | {USUAL: "data model batch score sparsity compile precision device out compare"}


def help_page(kind: type[Any], name: str) -> str:
    """The page, as wide as the terminal."""
    page = parser_output(kind, ["--help"], prog=f"prunus {name}")
    head, boxes = re.split(r"^(?= )", page, maxsplit=1, flags=re.MULTILINE)
    width = min(shutil.get_terminal_size().columns, WIDEST)
    lines = ["\n".join(textwrap.fill(part, width) for part in head.strip().splitlines())]
    left = {re.findall(r"\w[\w-]*", option)[0]: (option, text) for option, text in _options(boxes)}
    positional = " ".join(name for name, (option, _) in left.items() if not option.startswith("-"))
    named = {"arguments": positional} | GROUPS.get(name, {})
    for title, names in [*named.items(), (MORE if len(named) > 1 else "options", " ".join(left))]:
        found = [left.pop(one) for one in names.split() if one in left]
        if found:
            lines += ["", f"{title}:", *(line for option in found for line in _entry(*option, width))]
    return "\n".join(lines)


def parser_output(kind: type[Any], args: list[str], prog: str = "prunus") -> str:
    """What the parser prints, in plain text whose lines are not broken."""
    import tyro

    config = (tyro.conf.PositionalMetavarFromFieldName,)
    page, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "2000"
    try:
        with contextlib.redirect_stdout(page), contextlib.redirect_stderr(page), contextlib.suppress(SystemExit):
            tyro.cli(kind, args=args, prog=prog, config=config)
    finally:
        os.environ.pop("COLUMNS") if columns is None else os.environ.update(COLUMNS=columns)
    return re.sub(r"\x1b\[[0-9;]*m", "", page.getvalue())


def _options(boxes: str) -> Iterator[tuple[str, str]]:
    """Each option with its values, and its text, which may stand in a line of its own; titles have one space before."""
    option = ""
    for line in re.findall(r"^  .*", boxes, flags=re.MULTILINE):
        if line[2:3].strip():
            option, _, line = line.strip().partition("  ")
        if line.strip() and option != "-h, --help":
            yield option, line.strip()


def _entry(option: str, text: str, width: int) -> Iterator[str]:
    """The lines of one option; its default is not broken."""
    option = re.sub(r"\{None\}\|", "", re.sub(r"^--([\w-]+), --no-\1", r"--[no-]\1", option))
    text = re.sub(r" \((default: (None|'')?|repeatable)\)$", "", text)
    text = re.sub(r"\(default: .*\)$", lambda found: found[0].replace(" ", "\0"), text)
    lines = [line.replace("\0", " ") for line in textwrap.wrap(text, width - LEFT - 3, break_long_words=False)]
    if len(option) > LEFT - 1:
        wrapper = textwrap.TextWrapper(width, "  ", "      ", break_long_words=False, break_on_hyphens=False)
        yield from wrapper.wrap(option.replace(",", ", "))
        option = ""
    for place, line in enumerate(lines):
        yield f"  {option if not place else '':{LEFT}} {line}"
