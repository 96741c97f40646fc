"""Run(s) -> one self-contained HTML file, which asks no other host for anything and can be mailed or printed.

`charts` chooses the figures and `findings` writes the sentences; this module joins them with the facts of the runs
in `report.html.jinja`. plotly.js is inlined once; figures travel as JSON with five significant digits.
"""

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from headscope import charts, findings, schema, summary
from headscope.chart import Chart
from headscope.errors import BadInput, CannotWrite
from headscope.figures.style import GRAPH_CONFIG
from headscope.store import Run, concatenate

DIGITS = 5
"""Significant digits of the numbers in a figure."""
WHY = "why it is here"
HEAD_COLUMNS = ["growth", "cov", "retrieval", "sink_mass", "local_mass", "effective_base"]
"""What the table of chosen heads tells beside the longest effective length."""


def write(runs: Sequence[Run], out: Path) -> Path:
    """Write the report of `runs`, read as one, to the file `out` and return it.

    Raises BadInput for no run, or for runs that give one label to different models; CannotWrite when `out` cannot be.
    """
    if not runs:
        raise BadInput("a report needs at least one run: name a run directory")
    page = render(runs)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        draft = out.with_name(f".{out.name}.draft")
        draft.write_text(page, encoding="utf-8")
        draft.replace(out)
    except OSError as error:
        raise CannotWrite(f"cannot write {out}: {error.strerror or error}; choose another --out") from error
    return out


def render(runs: Sequence[Run]) -> str:
    """The report as HTML text."""
    run = concatenate(runs)
    sections = charts.sections(run)
    drawn = [chart for group in sections.values() for chart in group]
    page = _environment().get_template("report.html.jinja")
    return page.render(
        title=f"Attention heads of {', '.join(findings.few(run.models, 3))}" if run.models else "Probes",
        run=run,
        facts=[facts(each) for each in runs],
        models=run.manifest["models"],
        shown=findings.few(run.models),
        lengths=_distinct(run, "context_length"),
        documents=_distinct(run, "doc"),
        findings=findings.sentences(run),
        summary=table_rows(summary.models(run)) if run.models else None,
        sections=sections,
        starts=dict(zip(sections, accumulate(map(len, sections.values()), initial=0), strict=False)),
        heads=_head_rows(run) if run.models else {"rows": []},
        statistics=_statistics(run) if run.models else (),
        tables=[schema.TABLES[name] for name in run.tables],
        **_scripts(drawn),
    )


def view(title: str, lead: str, source: str, sections: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """A page of charts, words and tables as HTML text that stands alone.

    A part is `{"chart": Chart}`, `{"heading", "sentences"}` or `{"caption", "names", "rows"}`; `source` says of what.
    """
    drawn = [part["chart"] for group in sections.values() for part in group if "chart" in part]
    at = {id(chart): place for place, chart in enumerate(drawn)}
    placed = {
        heading: [{**part, "at": at[id(part["chart"])]} if "chart" in part else part for part in group]
        for heading, group in sections.items()
    }
    page = _environment().get_template("view.html.jinja")
    return page.render(title=title, lead=lead, source=source, sections=placed, **_scripts(drawn))


def _scripts(drawn: Sequence[Chart]) -> dict[str, Any]:
    return {
        "plotly": Markup(get_plotlyjs()),
        "figures": [_json(compact(chart.figure.to_plotly_json())) for chart in drawn],
        "config": _json(GRAPH_CONFIG),
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


def _json(value: Any) -> Markup:
    """JSON that can stand inside a script element."""
    told = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=dict)
    return Markup(told.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def facts(run: Run) -> dict[str, str]:
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


def _distinct(run: Run, column: str) -> list[Any]:
    """The values of a key column over all tables that have it, in order."""
    found = {item for name in run.tables if column in schema.TABLES[name].keys for item in run.table(name)[column]}
    return sorted(found)


def table_rows(frame: pd.DataFrame) -> dict[str, Any]:
    """A table for the template: worded column names and cells as text, columns of bounds folded into their value."""
    names = [str(name) for name in frame if not str(name).endswith(("_low", "_high"))]
    rows = [[told(row, name) for name in names] for row in frame.to_dict("records")]
    return {"names": [_column(name) for name in names], "rows": rows}


def _column(name: str) -> str:
    if name.startswith("nll_"):
        length = int(name.split("_")[1])
        return f"{'loss against the first' if name.endswith('diff') else 'loss'} at {length:,}, nats/token"
    if name.startswith("ess2_"):
        return f"ESS₂ at {int(name[5:]):,}, tokens"
    return summary.HEAD_STATISTICS[name].label if name in summary.HEAD_STATISTICS else name.replace("_", " ")


def told(row: dict[Any, Any], name: str) -> str:
    value = row[name]
    if not isinstance(value, float):
        return str(value)
    if math.isnan(value):
        return "–"
    digits = findings.number
    if name.startswith("nll_"):
        digits = "{:.3f}".format
    elif name.startswith("influence_"):
        digits = "{:+.2g}".format
    low, high = row.get(f"{name}_low", math.nan), row.get(f"{name}_high", math.nan)
    return digits(value) if math.isnan(low) or low == high else f"{digits(value)} ({digits(low)} to {digits(high)})"


def _head_rows(run: Run) -> dict[str, Any]:
    """The notable heads under the models that are shown, and why each was chosen."""
    heads = run.heads[run.heads["model"].isin(findings.few(run.models))]
    why, name = findings.notable(heads), summary.longest(heads)
    columns = ["layer", "head", "kv_group", WHY, "model", *([name] if name else []), *HEAD_COLUMNS]
    ends = [f"{column}{end}" for column in columns for end in ("_low", "_high")]
    rows = []
    for (layer, head), reason in why.items():
        found = heads[(heads["layer"] == layer) & (heads["head"] == head)]
        rows.append(found.assign(**{WHY: [reason, *[""] * (len(found) - 1)]}))
    kept = [column for column in [*columns, *ends] if rows and column in rows[0]]
    return table_rows(pd.concat(rows)[kept]) if rows else {"names": [], "rows": []}


def _statistics(run: Run) -> Iterable[summary.Statistic]:
    name = summary.longest(run.heads)
    lengths = [summary.statistic(name)] if name else []
    return [*lengths, *(known for column, known in summary.HEAD_STATISTICS.items() if column in run.heads)]


def _sha256(script: str) -> str:
    """The name of an inline script in a content security policy, so that no other script can run."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("headscope", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["sha256"] = _sha256
    return environment
