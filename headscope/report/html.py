"""Run(s) -> one self-contained HTML file, which asks no other host for anything and can be mailed or printed.

`outline` gathers what the probes show and say; this module joins it with the facts of the runs in `report.html.jinja`.
plotly.js is inlined once, compressed; figures travel as JSON with five significant digits.
"""

import base64
import gzip
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from headscope.errors import BadInput, CannotWrite
from headscope.figures.style import GRAPH_CONFIG
from headscope.report import outline, wording
from headscope.report.content import Chart, Listing, Piece, Shown
from headscope.report.words import few, here
from headscope.runs import columns, summary
from headscope.runs.run import Run, concatenate
from headscope.runs.schema import all_tables
from headscope.runs.statistics import Statistic, column, statistic, statistics
from headscope.runs.stored import Stored

DIGITS = 5
"""Significant digits of the numbers in a figure."""
WHY = "why it is here"
ENDS = ("_low", "_high")


def write(runs: Sequence[Run], out: Path | str) -> Path:
    """Write the report of `runs`, read as one, to the file `out` and return it.

    Raises BadInput for no run, or for runs that give one label to different models; BadRun for a damaged table;
    CannotWrite when `out` cannot be.
    """
    if not runs:
        raise BadInput("a report needs at least one run: name a run directory")
    out = Path(out)
    with _writing(out):
        if out.exists() and not out.is_file():
            raise CannotWrite(f"cannot write {out}: it is a folder or a device; choose another --out, a file")
    for run in runs:
        run.check()  # tables that no chart shows as well, and before any is drawn
    page = render(runs)
    with _writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        draft = out.with_name(f".report-{os.getpid()}.draft")  # a name that fits wherever that of `out` does
        try:
            draft.write_text(page, encoding="utf-8")
            draft.replace(out)
        finally:
            draft.unlink(missing_ok=True)
    return out


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CannotWrite(f"cannot write {out}: {error.strerror or error}; choose another --out") from error


def render(runs: Sequence[Run]) -> str:
    """The report as HTML text."""
    run = concatenate(runs)
    shown = outline.shown(run)
    chapters: dict[str, Sequence[Piece]] = {
        title: [part for group in groups for part in group.charts] for title, groups in outline.chapters(shown).items()
    }
    page = environment().get_template("report.html.jinja")
    return page.render(
        title=f"Attention heads of {', '.join(few(run.models, 3))}" if run.models else "Probes",
        run=run,
        facts=[facts(each) for each in runs],
        models=run.manifest["models"],
        shown=shown.models,
        lengths=_distinct(run, "context_length"),
        documents=_distinct(run, "doc"),
        terms=outline.glossary(run),
        findings=outline.findings(run),
        not_shown=outline.not_shown(run),
        side_by_side=wording.table("Medians over heads, and loss; intervals in brackets", summary.models(run)),
        chapters=chapters,
        heads=_chosen_heads(shown),
        longest=summary.longest(shown.heads),
        statistics=_statistics(run),
        tables=_tables(run),
        **_scripts(chapters),
    )


def view(title: str, lead: str, facts: Mapping[str, str], sections: Mapping[str, Sequence[Piece]]) -> str:
    """A page of charts, words and tables of text as HTML text that stands alone; `facts` say of what, by name."""
    page = environment().get_template("view.html.jinja")
    return page.render(title=title, lead=lead, facts=facts, sections=sections, **_scripts(sections))


def _scripts(sections: Mapping[str, Sequence[Piece]]) -> dict[str, Any]:
    drawn = [part for parts in sections.values() for part in parts if isinstance(part, Chart)]
    return {
        "plotly": Markup(get_plotlyjs()),
        "library": _library(),
        "figures": [as_json(compact(chart.figure.to_plotly_json())) for chart in drawn],
        "config": as_json(GRAPH_CONFIG),
    }


def compact(value: Any) -> Any:
    """Plain lists and numbers of `value` for JSON: floats to five significant digits, what is not finite to None."""
    if isinstance(value, dict):
        return {key: compact(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray | pd.Series | pd.Index):
        return [compact(item) for item in value]
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        number = float(f"{value:.{DIGITS}g}")
        if not math.isfinite(number):
            return None
        return int(number) if number.is_integer() and abs(number) < 1e15 else number
    return value


def as_json(value: Any) -> Markup:
    """JSON that can stand inside a script element."""
    told = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=dict)
    return Markup(told.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def facts(run: Stored) -> dict[str, str]:
    """What is known of how one run came about, in words."""
    manifest = run.manifest
    known = {
        "Run": run.name,
        "Started": manifest.get("started", ""),
        "Finished": manifest.get("finished", ""),
        "Seed": manifest.get("seed"),
        "Text": (manifest.get("config") or {}).get("texts"),
        "Versions": manifest.get("versions"),
        "Machine": manifest.get("hardware"),
        "Commit": manifest.get("git_commit"),
        "Timings": manifest.get("timings"),
    }
    facts = {name: _worded(value) for name, value in known.items() if value not in (None, "", {})}
    if config := manifest.get("config"):
        facts["Configuration"] = json.dumps(config, indent=1, ensure_ascii=False)
    return facts


def _worded(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_worded(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list):
        return ", ".join(map(_worded, value))
    return str(value)


def _tables(run: Run) -> list[columns.Table]:
    """The run's tables that an installed probe declares."""
    return [all_tables()[name] for name in run.tables if name in all_tables()]


def _distinct(run: Run, name: str) -> list[Any]:
    """The values of a key column over all tables that have it, in order."""
    return sorted({item for table in _tables(run) if name in table.keys for item in run.table(table.name)[name]})


def _chosen_heads(shown: Shown) -> Listing:
    """The notable heads under the models that are shown, and why each was chosen."""
    heads, name = shown.heads, summary.longest(shown.heads)
    best = [column for column, known in statistics().items() if known.best]
    told = [*([name] if name else []), "growth", "cov", *best, "sink_mass", "local_mass", "effective_base"]
    named = ["layer", "head", "kv_group", WHY, "model", *told, *(f"{column}{end}" for column in told for end in ENDS)]
    rows = []
    for (layer, head), reason in outline.notable(heads).items():
        found = heads[here(heads, layer, head)]
        rows.append(found.assign(**{WHY: [reason, *[""] * (len(found) - 1)]}))
    every = pd.concat(rows) if rows else heads[:0]
    kept = every[[column for column in named if column in every]]
    return wording.table("Chosen heads under each model; intervals in brackets", kept)


def _statistics(run: Run) -> list[Statistic]:
    """What is measured of heads; of lengths the longest."""
    longest = summary.longest(run.heads)
    return [statistic(name) for name in outline.measured(run.heads) if name == longest or column(name).length is None]


def _sha256(script: str) -> str:
    """The name of an inline script in a content security policy, so that no other script can run."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def packed(text: str) -> str:
    """A long text in half of its bytes or less, as text: gzip, in base64."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


@cache
def _library() -> str:
    return packed(get_plotlyjs())


@cache
def environment() -> jinja2.Environment:
    """The templates of reports and pages."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("headscope.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["sha256"] = _sha256
    return environment
