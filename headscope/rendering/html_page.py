"""The HTML report: one self-contained file that makes no network requests.

`assembly` collects the contents from the probes; `report.html.jinja` lays them out with the provenance of the runs. The
file holds plotly.js once, compressed, and the figures as JSON with five significant digits.
"""

import base64
import gzip
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from headscope.base.output_files import Output
from headscope.base.public_functions import checked
from headscope.errors import BadInput
from headscope.plots.style import GRAPH_CONFIG
from headscope.rendering import assembly, run_results
from headscope.rendering.blocks import Block, Chart, ChartGroup, PageContent, RenderContext, TextTable
from headscope.rendering.comparison import comparison_tables
from headscope.rendering.run_description import declared_tables, describe_run, document_sets, title
from headscope.rendering.text import explain_columns, head_mask, statistics_table
from headscope.results.collection import all_results, results_by_probe
from headscope.results.comparison import compare, in_order_of_time
from headscope.results.questions import MODELS_TOPIC
from headscope.results.words import sentence
from headscope.runs import summary
from headscope.runs.column_metadata import Statistic, parse_column, statistic, statistics
from headscope.runs.run import Run, combine_runs
from headscope.runs.run_tables import RunTables

SIGNIFICANT_DIGITS = 5
"""Significant digits of numbers in figures."""
PACKED_TYPES = {f"{kind}{8 * size}": f"{kind[0]}{size}" for kind in ("int", "uint") for size in (1, 2, 4)} | {
    "float32": "f4",
    "float64": "f8",
}
"""Types of plotly's packed arrays, by the name of the numpy type."""
REPORT = Output("a report of headscope", b'<meta name="generator" content="headscope">')
REASON_COLUMN = "reason"


@checked
def write_report(runs: Sequence[Run], out: Path | str) -> Path:
    """Write the report of the combined runs to the file `out` and return its path.

    Raises BadInput without a run or if two runs use one label for different models, BadRun for a damaged table, and
    CannotWrite if the file cannot be written. An older report is replaced; any other file is left as it is.
    """
    REPORT.check(out)
    for run in runs:
        run.check()  # before drawing, and also the tables that no chart uses
    return REPORT.write(out, render_report(runs).encode())


@checked
def render_report(runs: Sequence[Run]) -> str:
    """The report as HTML text."""
    if not runs:
        raise BadInput("a report needs at least one run. Name a run directory")
    run = combine_runs(runs)
    context = assembly.render_context(run)
    chapters = _collect_chapters(context)
    if len(runs) == 2:
        chapters["Changes between the runs"] = _Chapter([*comparison_tables(compare(*in_order_of_time(runs)))])
    return _render_file(
        "report.html.jinja",
        BlockRenderer(),
        title=title(run.models),
        introduction=describe_run(run),
        facts={},
        cards=[*assembly.overview_cards(context)],
        headlines=run_results.headline_lines(run),
        legend=run_results.LEGEND,
        warnings=[*run_results.warning_lines(run), *assembly.dropped_row_notes(run)],
        verdict_counts=run_results.count_verdicts(all_results(run)),
        claim_table=run_results.claim_table(all_results(run)),
        provenance=[provenance(stored) for stored in runs],
        models=run.manifest["models"],
        models_in_charts=context.models,
        model_notes=[sentence(result) for result in assembly.results_by_topic(run).get(MODELS_TOPIC, ())],
        documents=sorted(set().union(*document_sets(run))),
        terms=assembly.collect_glossary(run),
        model_table=_model_table(run),
        chapters=chapters,
        notable_heads=_notable_heads_table(context),
        statistics=_head_statistics(run),
        tables=declared_tables(run),
    )


@dataclass
class _Chapter:
    """The charts of a chapter, and the sentences about its results by topic."""

    blocks: list[Block] = field(default_factory=list)
    sentences: dict[str, list[str]] = field(default_factory=dict)


def _collect_chapters(context: RenderContext) -> dict[str, _Chapter]:
    """The chapters of a report by title. Claims and notes on models are not part of them."""
    chapters: dict[str, _Chapter] = {}
    groups_by_probe: dict[str, list[ChartGroup]] = {}
    for probe, group in assembly.drawn_groups(context):
        groups_by_probe.setdefault(probe.name, []).append(group)
        chapters.setdefault(group.chapter, _Chapter()).blocks.extend(group.charts)
    for name, results in results_by_probe(context.run).items():
        for topic, sentences in run_results.sentences_by_topic(results).items():
            chapter = chapters.setdefault(_chapter_title(topic, groups_by_probe.get(name, ())), _Chapter())
            chapter.sentences.setdefault(topic, []).extend(sentences)
    return chapters


def _chapter_title(topic: str, groups: Sequence[ChartGroup]) -> str:
    """The chapter of a probe that is about the topic, else its first one; the topic itself if it has no charts."""
    return next(
        (group.chapter for group in groups if assembly.is_about(group, topic)), groups[0].chapter if groups else topic
    )


def _model_table(run: Run) -> TextTable:
    frame = summary.model_table(run)
    caption = "Statistics of heads are medians; 95 % confidence intervals in brackets."
    return statistics_table(" ".join([caption, *explain_columns(map(str, frame))]), frame)


def render_page(content: PageContent, facts: Mapping[str, str] = MappingProxyType({})) -> str:
    """A self-contained page of charts, texts and tables as HTML text; `facts` describe the selection, by name."""
    renderer = BlockRenderer()
    return _render_file(
        "standalone.html.jinja",
        renderer,
        title=content.title,
        introduction=content.introduction,
        facts=facts,
        sections={name: [(renderer.html(block), "") for block in blocks] for name, blocks in content.sections.items()},
    )


def _render_file(template: str, renderer: "BlockRenderer", **variables: Any) -> str:
    """A template of a self-contained file with these variables."""
    return (
        template_environment()
        .get_template(template)
        .render(
            **variables,
            renderer=renderer,
            plotly=Markup(get_plotlyjs()),
            packed_plotly=_packed_plotly(),
            config=to_script_json(GRAPH_CONFIG),
        )
    )


class BlockRenderer:
    """Renders the blocks of one page as HTML, and collects their figures as JSON in the order of their numbers.

    `root` is the path to the files that links name.
    """

    def __init__(self, root: str = "") -> None:
        self.figures: list[Markup] = []
        self._root = root

    def html(self, block: Block) -> Markup:
        """The block as HTML."""
        number = self.add_figure(block) if isinstance(block, Chart) else 0
        html: Markup = block_macros().render_block(block, number, self._root)
        return html

    def add_figure(self, chart: Chart) -> int:
        """The number of the chart's figure on the page."""
        self.figures.append(to_script_json(figure_values(chart.picture)))
        return len(self.figures) - 1


def to_json_values(value: Any) -> Any:
    """Plain lists and numbers for JSON: floats with five significant digits, None for NaN and infinity."""
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


def figure_values(figure: go.Figure) -> dict[str, Any]:
    """A figure as values for JSON, as `to_json_values`, with its numeric arrays packed as plotly packs them.

    Plotly's own conversion takes several times as long.
    """
    traces = [_pack_arrays(trace.to_plotly_json()) for trace in figure.data]
    values: dict[str, Any] = to_json_values({"data": traces, "layout": _pack_arrays(figure.layout.to_plotly_json())})
    return values


def _pack_arrays(settings: Any) -> Any:
    if isinstance(settings, dict):
        return {key: value if key == "range" else _pack_arrays(value) for key, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [_pack_arrays(item) if isinstance(item, dict) else item for item in settings]
    return _packed(settings) if isinstance(settings, np.ndarray) else settings


def _packed(array: npt.NDArray[Any]) -> Any:
    """The typed array of plotly.js with these numbers; the array itself if it has none for them."""
    if array.size and array.dtype in (np.int64, np.uint64):
        kinds = ("int8", "int16", "int32") if array.dtype == np.int64 else ("uint8", "uint16", "uint32")
        ranges = {kind: np.iinfo(kind) for kind in kinds}
        fitting = [kind for kind in kinds if ranges[kind].min <= array.min() and array.max() <= ranges[kind].max]
        array = array.astype(fitting[0]) if fitting else array
    if not array.size or array.dtype.name not in PACKED_TYPES:
        return array
    packed = {"dtype": PACKED_TYPES[array.dtype.name], "bdata": base64.b64encode(array.tobytes()).decode()}
    return packed | ({"shape": ", ".join(map(str, array.shape))} if array.ndim > 1 else {})


def to_script_json(value: Any) -> Markup:
    """JSON that is safe inside a script element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=dict)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def provenance(run: RunTables) -> dict[str, str]:
    """Provenance of one run as text, by name: times, seed, texts, versions, machine, configuration."""
    manifest = run.manifest
    values = {
        "Run": run.name,
        "Started": manifest.get("started", ""),
        "Finished": manifest.get("finished", ""),
        "Seed": manifest.get("seed"),
        "Text": (manifest.get("config") or {}).get("texts"),
        "Versions": manifest.get("versions"),
        "Machine": manifest.get("hardware"),
        "Commit": manifest.get("git_commit"),
        "Seconds": (manifest.get("timings") or {}).get("seconds"),
    }
    facts = {name: _format_value(value) for name, value in values.items() if value not in (None, "", {})}
    if config := manifest.get("config"):
        facts["Configuration"] = json.dumps(config, indent=1, ensure_ascii=False)
    return facts


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_format_value(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list):
        return ", ".join(map(_format_value, value))
    return str(value)


def _notable_heads_table(context: RenderContext) -> TextTable:
    """The notable heads under the models in the charts, with the reason for each."""
    heads, longest = context.heads, summary.longest_ess_column(context.heads)
    scores = [name for name, stat in statistics().items() if stat.best_head_name]
    names = [*([longest] if longest else []), "growth", "cov", *scores, "sink_mass", "local_mass", "effective_base"]
    column_names = [
        "layer",
        "head",
        "kv_group",
        REASON_COLUMN,
        "model",
        *names,
        *(f"{name}_{end}" for name in names for end in ("low", "high")),
    ]
    rows = []
    for (layer, head), reason in assembly.notable_heads(heads).items():
        head_rows = heads[head_mask(heads, layer, head)]
        rows.append(head_rows.assign(**{REASON_COLUMN: [reason, *[""] * (len(head_rows) - 1)]}))
    table = pd.concat(rows) if rows else heads[:0]
    table = table[[name for name in column_names if name in table]]
    return statistics_table("Notable heads under each model; 95 % confidence intervals in brackets", table)


def _head_statistics(run: Run) -> list[Statistic]:
    """The measured statistics of heads; at the longest context length for statistics by length."""
    longest = summary.longest_ess_column(run.heads)
    return [
        statistic(name)
        for name in assembly.measured_statistics(run.heads)
        if name == longest or parse_column(name).length is None
    ]


def _csp_hash(script: str) -> str:
    """The hash of an inline script for the content security policy, which blocks all other scripts."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def gzip_base64(text: str) -> str:
    """Compress a text with gzip and encode it in base64."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


@cache
def _packed_plotly() -> str:
    return gzip_base64(get_plotlyjs())


def block_macros() -> Any:
    """The macros of `blocks.html.jinja`."""
    return template_environment().get_template("blocks.html.jinja").module


@cache
def template_environment() -> jinja2.Environment:
    """The jinja environment of all report templates."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("headscope.rendering", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"sha256": _csp_hash, "gzip_base64": gzip_base64}
    return environment
