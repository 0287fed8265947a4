"""One HTML page that needs nothing beside it: charts by plotly, whose script is taken from the installed package."""

import hashlib
import json
from base64 import b64encode
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from .sections import sections
from .source import Source, read_source
from .words import figures, headline, lede


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the page of a run or study folder, whole or not at all, and return where it is."""
    from ...files.atomic import write_atomically

    target = out or folder / "report.html"
    if target.is_dir():
        raise ValueError(f"{target} is a folder, but the page is a file; give its name too: {target / 'report.html'}")
    page = render(read_source(folder))
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, lambda file: file.write(page.encode(errors="replace")))  # JSON may hold half a letter
    return target


def render(source: Source) -> str:
    """The page as text; the same folder gives the same page."""
    try:
        from jinja2 import Environment
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ValueError(f"a report needs {error.name}: pip install 'prunus[report]'") from None
    parts = sections(source)
    panels = [panel for part in parts for panel in part.panels]
    data = [{"data": panel.traces, "layout": panel.layout, "height": panel.height} for panel in panels]
    library, own = _inline(get_plotlyjs()), _inline(_file("page.js"))
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_file("page.html"))
    return template.render(
        source=source,
        headline=_together(headline(source)),
        lede=_together(lede(source)),
        figures=figures(source),
        sections=parts,
        style=_file("style.css"),
        data=_json(data),
        scripts=[library, own],
        policy=_policy([library, own]),
    )


def _together(text: str) -> str:
    """The text with no line end between a number and what belongs to it."""
    return text.replace(" %", "\u00a0%").replace(" ± ", "\u00a0±\u00a0")


def _policy(scripts: Sequence[str]) -> str:
    """No network, and no script but the two of this page, by their digests. The chart library writes styles."""
    digests = " ".join(f"'sha256-{b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return (
        f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _inline(script: str) -> str:
    """A script as it may stand in a page: nothing in it ends its element, and lines end as HTML has them."""
    return script.replace("\r\n", "\n").replace("\r", "\n").replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _json(value: Any) -> str:
    """JSON that may stand in a script element, whatever text it holds."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _file(name: str) -> str:
    return resources.files("prunus.lab.report").joinpath(name).read_text(encoding="utf-8")
