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
from headscope.plots.style import GRAPH_CONFIG
from headscope.report import assembly
from headscope.report.blocks import Block, Chart, RenderContext, TextTable
from headscope.report.text import evenly_spaced, head_mask, statistics_table
from headscope.runs import columns, summary
from headscope.runs.column_metadata import Statistic, column, statistic, statistics
from headscope.runs.run import Run, concatenate
from headscope.runs.run_tables import RunTables
from headscope.runs.schema import all_tables

SIGNIFICANT_DIGITS = 5
"""Significant digits of the numbers in a figure."""
REASON_COLUMN = "why it is here"
INTERVAL_SUFFIXES = ("_low", "_high")


def write_report(runs: Sequence[Run], out: Path | str) -> Path:
    """Write the report of `runs`, read as one, to the file `out` and return it.

    Raises BadInput for no run, or for runs that give one label to different models; BadRun for a damaged table;
    CannotWrite when `out` cannot be.
    """
    if not runs:
        raise BadInput("a report needs at least one run: name a run directory")
    out = Path(out)
    with _convert_write_errors(out):
        if out.exists() and not out.is_file():
            raise CannotWrite(f"cannot write {out}: it is a folder or a device; choose another --out, a file")
    for run in runs:
        run.check()  # tables that no chart shows as well, and before any is drawn
    page = render_report(runs)
    with _convert_write_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        draft = out.with_name(f".report-{os.getpid()}.draft")  # a name that fits wherever that of `out` does
        try:
            draft.write_text(page, encoding="utf-8")
            draft.replace(out)
        finally:
            draft.unlink(missing_ok=True)
    return out


@contextmanager
def _convert_write_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CannotWrite(f"cannot write {out}: {error.strerror or error}; choose another --out") from error


def render_report(runs: Sequence[Run]) -> str:
    """The report as HTML text."""
    run = concatenate(runs)
    shown = assembly.render_context(run)
    chapters: dict[str, Sequence[Block]] = {
        title: [part for group in groups for part in group.charts]
        for title, groups in assembly.collect_chapters(shown).items()
    }
    page = template_environment().get_template("report.html.jinja")
    return page.render(
        title=f"Attention heads of {', '.join(evenly_spaced(run.models, 3))}" if run.models else "Probes",
        run=run,
        provenance=[provenance(stored) for stored in runs],
        models=run.manifest["models"],
        models_in_charts=shown.models,
        lengths=_distinct_values(run, "context_length"),
        documents=_distinct_values(run, "doc"),
        terms=assembly.collect_glossary(run),
        findings=assembly.findings_by_topic(run),
        dropped_row_notes=assembly.dropped_row_notes(run),
        model_table=statistics_table("Medians over heads, and loss; intervals in brackets", summary.models(run)),
        chapters=chapters,
        notable_heads=_notable_heads_table(shown),
        longest=summary.longest(shown.heads),
        statistics=_head_statistics(run),
        tables=_declared_tables(run),
        **_script_variables(chapters),
    )


def render_page(
    title: str, introduction: str, facts: Mapping[str, str], sections: Mapping[str, Sequence[Block]]
) -> str:
    """A page of charts, words and tables of text as HTML text that stands alone; `facts` say of what, by name."""
    page = template_environment().get_template("standalone.html.jinja")
    return page.render(
        title=title, introduction=introduction, facts=facts, sections=sections, **_script_variables(sections)
    )


def _script_variables(sections: Mapping[str, Sequence[Block]]) -> dict[str, Any]:
    drawn = [part for parts in sections.values() for part in parts if isinstance(part, Chart)]
    return {
        "plotly": Markup(get_plotlyjs()),
        "packed_plotly": _packed_plotly(),
        "figures": [to_script_json(to_json_values(chart.figure.to_plotly_json())) for chart in drawn],
        "config": to_script_json(GRAPH_CONFIG),
    }


def to_json_values(value: Any) -> Any:
    """Plain lists and numbers of `value` for JSON: floats to five significant digits, what is not finite to None."""
    if isinstance(value, dict):
        return {key: to_json_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray | pd.Series | pd.Index):
        return [to_json_values(item) for item in value]
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        number = float(f"{value:.{SIGNIFICANT_DIGITS}g}")
        if not math.isfinite(number):
            return None
        return int(number) if number.is_integer() and abs(number) < 1e15 else number
    return value


def to_script_json(value: Any) -> Markup:
    """JSON that can stand inside a script element."""
    told = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=dict)
    return Markup(told.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def provenance(run: RunTables) -> dict[str, str]:
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
    facts = {name: _format_value(value) for name, value in known.items() if value not in (None, "", {})}
    if config := manifest.get("config"):
        facts["Configuration"] = json.dumps(config, indent=1, ensure_ascii=False)
    return facts


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_format_value(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list):
        return ", ".join(map(_format_value, value))
    return str(value)


def _declared_tables(run: Run) -> list[columns.Table]:
    """The run's tables that an installed probe declares."""
    return [all_tables()[name] for name in run.tables if name in all_tables()]


def _distinct_values(run: Run, key_column: str) -> list[Any]:
    """The values of a key column over all tables that have it, in order."""
    return sorted(
        {
            item
            for table in _declared_tables(run)
            if key_column in table.keys
            for item in run.table(table.name)[key_column]
        }
    )


def _notable_heads_table(context: RenderContext) -> TextTable:
    """The notable heads under the models that are shown, and why each was chosen."""
    heads, name = context.heads, summary.longest(context.heads)
    best = [column for column, known in statistics().items() if known.best]
    told = [*([name] if name else []), "growth", "cov", *best, "sink_mass", "local_mass", "effective_base"]
    named = [
        "layer",
        "head",
        "kv_group",
        REASON_COLUMN,
        "model",
        *told,
        *(f"{column}{end}" for column in told for end in INTERVAL_SUFFIXES),
    ]
    rows = []
    for (layer, head), reason in assembly.notable_heads(heads).items():
        found = heads[head_mask(heads, layer, head)]
        rows.append(found.assign(**{REASON_COLUMN: [reason, *[""] * (len(found) - 1)]}))
    every = pd.concat(rows) if rows else heads[:0]
    kept = every[[column for column in named if column in every]]
    return statistics_table("Chosen heads under each model; intervals in brackets", kept)


def _head_statistics(run: Run) -> list[Statistic]:
    """What is measured of heads; of lengths the longest."""
    longest = summary.longest(run.heads)
    return [
        statistic(name)
        for name in assembly.measured_statistics(run.heads)
        if name == longest or column(name).length is None
    ]


def _csp_hash(script: str) -> str:
    """The name of an inline script in a content security policy, so that no other script can run."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def gzip_base64(text: str) -> str:
    """A long text in half of its bytes or less, as text: gzip, in base64."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


@cache
def _packed_plotly() -> str:
    return gzip_base64(get_plotlyjs())


@cache
def template_environment() -> jinja2.Environment:
    """The templates of reports and pages."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("headscope.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["sha256"] = _csp_hash
    return environment
