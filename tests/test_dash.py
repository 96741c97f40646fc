"""The app without a browser: the state in the URL, the content of pages, and the security of the server."""

import ast
import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from dash import dcc, html
from support.example_probes import Broken, Foreign, Late, Torn, WithoutTab, WithPage
from support.refusals import assert_names, refuses
from support.synthetic_runs import synthetic_run

from benchmarks.synthetic_run import synthetic_manifest
from dashboards import export
from dashboards.app import _describe_opened_run, create_app
from dashboards.controls import RANK_LINE_OPTIONS, build_controls
from dashboards.layout import all_pages, browser_state, page_shell, resolve_url
from dashboards.lazy_loading import RenderedPage, rendered_page
from dashboards.pages import compare, probe
from dashboards.run_store import current_store
from dashboards.tabs import tab_bar, visible_sections
from dashboards.view_state import FILTER_PARAMETERS, ViewState, parse_head, parse_query
from headscope.base import plugins
from headscope.base.head_set import HeadSet
from headscope.errors import BadInput, BrokenProbe
from headscope.probe import Probe
from headscope.rendering import assembly, similar_heads
from headscope.rendering.assembly import measured_statistics
from headscope.rendering.blocks import Chart, HeadTable, Links, PageContent, TextBlock, TextTable
from headscope.results.questions import questions
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run, combine_runs
from headscope.runs.trainings import has_mixed_lengths
from headscope.runs.writer import RunWriter

PATHS = [page.PATH for page in all_pages()]
PATHS_WITH_CHARTS = ("/", "/heads", "/head", "/compare", "/retrieval", "/influence")
"""Pages that have a chart for any run with models."""
ROOT = Path(__file__).parent.parent
TINY = {"layers": 2, "heads": 4, "groups": 2, "pairs": 2, "lengths": (256,), "docs": 2}
SOURCES = sorted((ROOT / "dashboards").rglob("*.py"))
assert SOURCES


def all_blocks(content: PageContent) -> list:
    return [block for blocks in content.sections.values() for block in blocks]


def all_components(page, run: Run, content: PageContent, view: ViewState) -> list:
    """The components of the page, deferred ones included."""
    rendered = RenderedPage("", page, run, view, content)
    return [*rendered.initial_components(), *rendered.deferred_components()]


def walk(component) -> Iterator:
    """The component or components, and all that they contain."""
    for item in component if isinstance(component, list | tuple) else [component]:
        yield item
        if (children := getattr(item, "children", None)) is not None:
            yield from walk(children)


def control_names(components) -> list[str]:
    ids = [item.id for item in walk(components) if isinstance(getattr(item, "id", None), dict)]
    return [component_id["control"] for component_id in ids if "control" in component_id]


def with_class(components, name: str) -> list:
    return [item for item in walk(components) if name in (getattr(item, "className", "") or "").split()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return synthetic_run(folder, models=("base", "yarn", "learned"), pairs=2)


@pytest.fixture(scope="module")
def client(folder: Path, run: Run):
    return create_app(folder).server.test_client()


@pytest.mark.slow
def test_a_view_without_a_query_has_defaults(run: Run):
    view = ViewState.from_query({}, run)
    assert (view.model, view.statistic_name, view.baseline) == ("learned", "ess2_1024", None)
    assert not view.has_filters
    assert view.filter_heads(run.heads).equals(run.heads)


@pytest.mark.slow
def test_filters_by_one_model_apply_to_all_models(run: Run):
    query = {"model": "yarn", "stat": "growth", "layers": "1-2", "min": "0.2", "max": "0.9"}
    filtered = ViewState.from_query(query, run).filter_heads(run.heads)
    rows = run.heads[(run.heads["model"] == "yarn") & run.heads["layer"].between(1, 2)]
    expected = rows[rows["growth"].between(0.2, 0.9)][["layer", "head"]]
    for _, block in filtered.groupby("model", observed=True):
        assert block[["layer", "head"]].to_numpy().tolist() == expected.to_numpy().tolist()


def test_a_value_on_the_bound_of_a_filter_passes_whatever_its_rounding(run: Run):
    heads = pd.DataFrame({"model": "yarn", "layer": 0, "head": range(3), "growth": [0.1, 0.2, 0.3]})
    for column in (heads["growth"], heads["growth"].astype("float32")):
        for low, high in (("0.1", "0.2"), ("0.2", "0.3"), ("0.20000001", "0.3")):
            query = {"model": "yarn", "stat": "growth", "min": low, "max": high}
            assert len(ViewState.from_query(query, run).filter_heads(heads.assign(growth=column))) == 2


@pytest.mark.slow
def test_masked_heads_keep_their_rows_and_lose_their_values(run: Run):
    view = ViewState.from_query({"layers": "0-1"}, run)
    masked = view.mask_filtered(run.heads)
    assert len(masked) == len(run.heads)
    assert masked.loc[masked["layer"] > 1, "growth"].isna().all()
    assert masked.loc[masked["layer"] <= 1, "growth"].notna().all()


def test_links_keep_the_state_without_the_parameters_to_drop(run: Run):
    view = ViewState.from_query({"model": "yarn", "heads": "1.2_0.3", "role": "local"}, run)
    assert {*view.selected_heads} == {(1, 2), (0, 3)}
    assert view.head_link(3, 2) == "/head/3.2?model=yarn&heads=1.2_0.3"
    assert view.link("", *FILTER_PARAMETERS) == "?model=yarn&heads=1.2_0.3"


def test_selected_heads_have_one_spelling_in_the_url(run: Run):
    for text, query in (("L1H2,L0H3", {"heads": "1.2_0.3"}), ("1.2_x", {}), ("", {})):
        assert ViewState.from_query({"heads": text}, run).query == query


def test_every_tab_can_be_chosen_whatever_its_script(run: Run):
    headings = ("Attention", "注意", "頭")
    content = PageContent("Title", "", {heading: [TextBlock(["text"])] for heading in headings}, tabs=True)
    for link, heading in zip(tab_bar(content, ViewState.from_query({}, run))[0].children, headings, strict=True):
        view = ViewState.from_query(parse_query(link.href), run)
        assert [*visible_sections(content, view)] == [heading]


def test_a_query_is_read_and_written_back(run: Run):
    query = "?baseline=base&heads=1.2&min=0.2&max=0.9&stat=growth"
    view = ViewState.from_query(parse_query(query), run)
    assert (view.baseline, [*view.selected_heads], view.min_value, view.max_value) == ("base", [(1, 2)], 0.2, 0.9)
    assert view.link("") == query


@pytest.mark.parametrize(
    ("identifier", "head"), [("3.2", (3, 2)), ("L3H2", (3, 2)), ("3.g1", (3, 3)), ("0.g0", (0, 0))]
)
def test_a_path_names_a_head_or_a_kv_group(run: Run, identifier: str, head: tuple[int, int]):
    assert parse_head(identifier, run) == head


@pytest.mark.parametrize(
    ("identifier", "named"),
    [
        *((text, (f"'{text}'", "L18H6")) for text in ("", "3", "3.2.1", "-1.0", "a.b", "3.2/../..", "١.٢")),
        ("3.6", ("head 6", "layer 3", "/heads")),
        ("4.0", ("head 0", "layer 4", "/heads")),
        ("3.g2", ("KV group 2", "layer 3", "/heads")),
    ],
)
def test_a_path_without_a_head_of_the_run_is_refused(run: Run, identifier: str, named: tuple[str, ...]):
    with refuses(BadInput, *named):
        parse_head(identifier, run)


def test_unmeasured_statistics_cannot_be_selected(run: Run):
    names = measured_statistics(run.heads)
    assert names[:2] == ["ess2_1024", "ess2_256"]
    assert all(run.heads[name].notna().any() for name in names)


@pytest.mark.parametrize("name", ["measure", "patching", "needle", "sparsity"])
def test_pages_of_heads_open_on_a_statistic_of_a_probe_that_was_run(tmp_path: Path, name: str):
    view = ViewState.from_query({}, synthetic_run(tmp_path, models=("base",), probes=[name]))
    assert assembly.probe_for_statistic(view.statistic_name).name == name


def test_only_pages_about_heads_have_filters_of_heads(run: Run):
    filters = {page.PATH: {*page.controls(run)} & {*FILTER_PARAMETERS} for page in probe.probe_pages()}
    assert filters["/retrieval"] == {"layers", "role", "set"}
    assert filters["/benchmarks"] == set()


def test_the_navigation_has_a_tab_per_question_and_a_row_of_its_pages():
    links = [item for item in walk(page_shell()) if isinstance(item, html.A) and item.to_plotly_json()["props"]]
    tabs = [link.children for link in links if hasattr(link, "data-tab")]
    assert [*tabs] == ["Overview", "Heads", "Head", "Compare", "Prompts", "Tasks", "Causes", "Training", "Runs"]
    pages = {getattr(link, "data-page"): link.children for link in links if hasattr(link, "data-page")}
    expected = {"/lens": "Lens", "/retrieval": "Retrieval", "/influence": "Influence", "/checkpoints": "Checkpoints"}
    assert {path: pages[path] for path in expected} == expected


@pytest.mark.slow
@pytest.mark.exhaustive(sample=18)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("matches", ["some", "none"])
def test_every_page_applies_filters_notes_what_it_ignores_and_is_exported(client, path: str, matches: str):
    query = {
        "model": "yarn",
        "baseline": "base",
        "stat": "growth",
        "layers": "1-2",
        "role": "local",
        "heads": "1.2_0.3",
        "sets": "mine:1.2_1.3_2.0_2.1",
        "set": "mine",
        **({"min": "99"} if matches == "none" else {}),
    }
    with client.application.app_context():
        page, run, view, content = resolve_url(path, query)
        components = all_components(page, run, content, view)
        controls = control_names(build_controls(page, run, view))
    assert controls == [*page.controls(run)]
    notices = [item.children for item in components if "notice" in (getattr(item, "className", "") or "")]
    filters = {"layers", "role", "set", *(["min"] if matches == "none" else [])}
    if unused := filters - {*controls}:
        assert any(all(name in str(notice) for name in unused) for notice in notices)
    if view.has_filters:
        ((summary, link, *_),) = [notice for notice in notices if isinstance(notice, list)]
        assert_names(summary, 24, "layers 1 to 2", "local", "mine")
        sets = "sets=mine%3A1.2_1.3_2.0_2.1"
        assert link.href == f"?model=yarn&baseline=base&stat=growth&heads=1.2_0.3&{sets}&run={run.name}"
    charts = [block for block in all_blocks(content) if isinstance(block, Chart)]
    shown = [block for blocks in visible_sections(content, view).values() for block in blocks]
    assert sum(isinstance(item, dcc.Graph) for item in walk(components)) == sum(isinstance(b, Chart) for b in shown)
    if path in PATHS_WITH_CHARTS:
        assert charts
    introduction = components[1].children
    assert ("No head matches" in introduction) == (matches == "none" and path in ("/heads", "/compare"))
    page_html = export.render_page_html(content, run, view)
    assert page_html.count("<h1>") == 1
    assert page_html.count("data-figure=") == len(charts)
    assert "http://" not in page_html.split("<script")[0].replace("http://www.w3.org", "")


# Every view


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that share a label; one model alone has influence, another alone has retrieval."""
    folder = tmp_path_factory.mktemp("uneven")
    size = {"layers": 4, "heads": 4, "groups": 4, "pairs": 2, "lengths": (256,), "docs": 3}
    whole = synthetic_run(tmp_path_factory.mktemp("whole"), models=("base", "learned"), **size)
    tables = {name: whole.table(name) for name in whole.tables}
    tables["influence"] = tables["influence"][tables["influence"]["model"] == "learned"]
    tables["influence_sets"] = tables["influence_sets"][tables["influence_sets"]["model"] == "learned"]
    for name in ("needles", "retrieval", "needle_ablation"):
        tables[name] = tables[name][tables[name]["model"] == "base"]
    with RunWriter.open(folder, "uneven", {}) as writer:
        writer.add("all", tables)
        writer.commit(["all"], synthetic_manifest(whole.models, layers=4, heads=4, groups=4))
    synthetic_run(folder, models=("base", "ntk"), seed=1, **size)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("is_combined", [False, True], ids=["one run", "combined runs"])
def test_every_view_renders(
    uneven: Path, is_combined: bool, monkeypatch: pytest.MonkeyPatch, sampled: Callable[..., list[Any]]
):
    """Every page with every value of its controls and every pair of values, as the app builds it.

    Of three values together, one example per kind: which of model and baseline have the statistic, and its scale. For
    combined runs, one statistic stands for all that the same models have on the same scale.
    """
    for module, name, key in CACHED_FUNCTIONS:
        monkeypatch.setattr(module, name, _cached(getattr(module, name), key))
    with create_app(uneven).server.app_context():
        names = sorted((path.name for path in uneven.iterdir()), key=lambda name: "-uneven-" not in name)
        runs = names if is_combined else names[:1]
        run = resolve_url("/", {"run": runs})[1]
        assert is_combined == any("base · " in label for label in run.models)
        views = [(page, query) for page in all_pages() for query in _queries(page, run)]
        assert len(views) > 90
        for page, query in sampled(views, SAMPLED_VIEWS):
            _, run, view, content = resolve_url(page.PATH, {"run": runs, **query})
            assert all_components(page, run, content, view)[0].children == content.title, query
            assert build_controls(page, run, view)
            state = browser_state(page.PATH, "", page, run, view, content)
            assert state["query_string"].count("run=") == len(runs)
            assert not view.notes
            assert all_blocks(content) or content.introduction, f"{page.PATH} {query} is empty"


SAMPLED_VIEWS = 24
CACHED_FUNCTIONS = (
    (
        assembly,
        "charts_for_page",
        lambda context, page: (page, *context.models, context.selected_model),
    ),
    (similar_heads, "plot_components", lambda run, components, model, *heads: (run.name, model, str(heads))),
    (compare, "box_chart", lambda context, name: (name, *context.models)),
    (compare, "_layer_chart", lambda context, name: (name, *context.models)),
    (compare, "comparison_chart", lambda heads, *arguments: (*heads["model"].unique(), *arguments)),
    (
        compare,
        "rank_chart",
        lambda heads, name, baseline, selected, lines: (*heads["model"].unique(), name, baseline, *selected, lines),
    ),
)
"""Slow functions that depend on part of the view only: called once per key."""


def _cached(function: Callable, key: Callable) -> Callable:
    results: dict = {}

    def cached(*arguments):
        if (at := key(*arguments)) not in results:
            results[at] = function(*arguments)
        return results[at]

    return cached


def _queries(page, run: Run) -> Iterator[dict[str, str]]:
    """Every pair of values of its controls; of three values one example per kind."""
    controls, stats = page.controls(run), measured_statistics(run.heads)
    if len(run.parts) > 1:
        stats = [*{(*assembly.models_with_statistic(run, stat), *_scale(run, stat)): stat for stat in stats}.values()]
    yield {}
    if "stat" not in controls:
        yield from ({"model": model} for model in run.models if "model" in controls)
        return
    models, baselines, kinds = run.models if "model" in controls else [""], ["", *run.models], set()
    for at, stat in enumerate(stats):
        for shift, model in enumerate(models):
            baseline = baselines[(at + shift) % len(baselines)]
            kinds.add(_kind(run, model, baseline, stat))
            lines = RANK_LINE_OPTIONS[at % 2]["value"] if "rank_lines" in controls else ""
            yield _query(model, baseline, stat, lines)
    for model, baseline, stat in product(models, baselines, stats):
        if (kind := _kind(run, model, baseline, stat)) not in kinds:
            kinds.add(kind)
            yield _query(model, baseline, stat, "")


def _query(model: str, baseline: str, stat: str, rank_lines: str) -> dict[str, str]:
    values = {"model": model, "baseline": baseline, "stat": stat, "rank_lines": rank_lines}
    return {name: value for name, value in values.items() if value}


def _kind(run: Run, model: str, baseline: str, stat: str) -> tuple:
    """What decides how a statistic of a model is shown against a baseline."""
    models_with = assembly.models_with_statistic(run, stat)
    is_partial = len(models_with) < len(run.models)
    presence = model in models_with, baseline in models_with, baseline == "", model == baseline, is_partial
    return *presence, *_scale(run, stat)


def _scale(run: Run, stat: str) -> tuple[bool, bool, bool]:
    return statistic(stat).log_scale, statistic(stat).is_signed, f"{stat}_low" in run.heads


@pytest.mark.slow
def test_a_page_without_the_statistic_names_the_models_that_have_it_and_the_command(uneven: Path):
    with create_app(uneven).server.app_context():
        name = next(path.name for path in uneven.iterdir() if "-uneven-" in path.name)
        _, _, _, content = resolve_url("/heads", {"run": name, "model": "base", "stat": "influence_joint"})
    (text,) = [block for block in all_blocks(content) if isinstance(block, TextBlock)]
    assert_names(text.sentences[0], "influence", "base", "learned")
    assert "headscope influence --model" in text.sentences[1]
    assert [link.href for link in text.links.links] == [f"?run={name}&model=learned&stat=influence_joint"]


def test_a_view_that_fails_shows_the_error_and_no_controls(client, run: Run, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr("dashboards.pages.heads.content", broken)
    output = "..content.children...run-control.children...controls.children...page-state.data.."
    body = {
        "output": output,
        "outputs": [{"id": i, "property": p} for i, p in (item.split(".") for item in output[2:-2].split("..."))],
        "inputs": [
            {"id": "url", "property": "pathname", "value": "/heads"},
            {"id": "url", "property": "search", "value": ""},
        ],
        "state": [{"id": "page-state", "property": "data", "value": None}],
        "changedPropIds": ["url.pathname"],
    }
    reply = client.post("/_dash-update-component", json=body)
    assert reply.status_code == 200
    response = reply.get_json()["response"]
    assert "RuntimeError: out of order" in str(response["content"])
    assert response["run-control"]["children"] == response["controls"]["children"] == []


@pytest.mark.slow
def test_a_page_sends_the_blocks_of_a_window_first_and_the_rest_on_request(client, run: Run):
    search = f"?run={run.name}"
    with client.application.app_context():
        rendered = rendered_page("/compare", search)
        assert rendered_page("/compare", search) is rendered, "rendered pages are cached"
        initial = [*walk(rendered.initial_components())]
        ids = [item.id for item in initial if isinstance(getattr(item, "id", None), dict)]
        (request_id,) = [component_id for component_id in ids if component_id.get("part") == "request"]
        first = [item.figure.layout.title.text for item in initial if isinstance(item, dcc.Graph)]
        shown = [blocks for heading, blocks in rendered.content.sections.items() if not heading]
        shown += [blocks for heading, blocks in rendered.content.sections.items() if heading][:1]  # the first tab
        charts = [block for blocks in shown for block in blocks if isinstance(block, Chart)]
    assert request_id == {"deferred": f"/compare{search}", "part": "request"}
    blocks_id = {**request_id, "part": "blocks"}
    body = {
        "output": '{"deferred":["MATCH"],"part":"blocks"}.children',
        "outputs": {"id": blocks_id, "property": "children"},
        "inputs": [{"id": request_id, "property": "data", "value": {}}],
        "state": [{"id": blocks_id, "property": "id", "value": blocks_id}],
        "changedPropIds": [],
    }
    (reply,) = client.post("/_dash-update-component", json=body).get_json()["response"].values()
    assert 0 < len(first) < len(charts)
    assert str(reply).count("'figure': {") == len(charts) - len(first)


def test_a_page_that_fails_while_it_is_rendered_is_not_cached(client, run: Run):
    def broken(*_: object) -> None:
        raise RuntimeError("out of order")

    with client.application.app_context():
        rendered = rendered_page("/heads", "?model=yarn")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dashboards.lazy_loading.build_component", broken)
            failed = [*walk(rendered.initial_components())]
        assert not any(isinstance(item, dcc.Graph) for item in failed)
        assert any("out of order" in str(item.children) for item in failed if isinstance(item, html.P))
        again = rendered_page("/heads", "?model=yarn").initial_components()
        assert any(isinstance(item, dcc.Graph) for item in walk(again))


@pytest.mark.slow
def test_a_cached_page_is_rendered_again_when_a_run_is_added(tmp_path: Path):
    synthetic_run(tmp_path, **TINY)
    with create_app(tmp_path).server.app_context():
        before = rendered_page("/runs", "")
        assert rendered_page("/runs", "") is before
        synthetic_run(tmp_path, **TINY, seed=1)
        assert rendered_page("/runs", "") is not before


# The URL is the state


@pytest.mark.slow
def test_the_url_names_the_run_and_a_newer_run_is_offered(tmp_path: Path):
    first = synthetic_run(tmp_path, **TINY)
    with create_app(tmp_path).server.app_context():
        page, run, view, content = resolve_url("/heads", {})
        assert browser_state("/heads", "", page, run, view, content)["query_string"] == f"?run={first.name}"
        synthetic_run(tmp_path, **TINY, seed=1).path.rename(tmp_path / "29991231T000000Z-new-00000000")
        page, run, view, content = resolve_url("/heads", {"run": first.name})
        assert run.name == first.name
        assert current_store().newest_since_start() == "29991231T000000Z-new-00000000"


@pytest.mark.slow
def test_a_given_run_is_shown_first_and_existing_newer_runs_are_not_offered(tmp_path: Path):
    first = synthetic_run(tmp_path, **TINY)
    synthetic_run(tmp_path, **TINY, seed=1).path.rename(tmp_path / "29991231T000000Z-new-00000000")
    for path, name in ((tmp_path, "29991231T000000Z-new-00000000"), (first.path, first.name)):
        with create_app(path).server.app_context():
            assert resolve_url("/heads", {})[1].name == name
            assert current_store().newest_since_start() is None
            assert len(current_store().list_runs()) == 2
            opened = _describe_opened_run(current_store())
            assert_names(opened, tmp_path / name)
            assert_names(opened.replace(str(tmp_path / name), ""), 1, "'Combined runs'")


def test_the_exported_table_of_heads_is_sorted_and_filtered_as_in_the_browser(run: Run):
    filters = (
        '{"growth": {"type": "greaterThan", "filter": 0.3}, "layer": {"type": "inRange", "filter": 0, "filterTo": 3}}'
    )
    query = {"sort": "growth-desc", "column_filters": filters, "heads": "1.2_1.3_2.4_2.5"}
    view = ViewState.from_query(query, run)
    heads = run.heads[run.heads["model"] == "yarn"]
    table = HeadTable("yarn", heads, "growth")
    expected = heads[heads["layer"].isin([1, 2]) & (heads["growth"] > 0.3)]
    assert len(expected) > len(view.selected_heads), "rows that are not selected are shown too"
    growth = export.visible_rows(table, view)["growth"].tolist()
    assert growth == sorted(expected["growth"], reverse=True)
    assert export.visible_rows(table, replace(view, sort=None))["growth"].tolist() == growth, "the default sort"
    assert export.file_name_suffix(run, view) == export.file_name_suffix(run, replace(view, selected_heads=HeadSet(())))
    either = {"operator": "OR", "conditions": [{"type": "lessThan", "filter": 1}, {"type": "blank"}]}
    view = ViewState.from_query({"column_filters": json.dumps({"layer": either})}, run)
    assert set(export.visible_rows(table, view)["layer"]) == {0}


@pytest.mark.parametrize("path", ["/window", "/scaling"])
def test_a_page_without_its_tables_names_the_command_that_makes_them(client, path: str):
    with client.application.app_context():
        page, run, view, content = resolve_url(path, {})
        (text,) = all_blocks(content)
        assert control_names(build_controls(page, run, view)) == []
    assert isinstance(text, TextBlock)
    assert text.command == f"headscope {path[1:]}"


def test_the_command_of_the_comparison_quotes_the_checkpoint_and_labels_another_model(tmp_path: Path):
    run = synthetic_run(tmp_path, models=("yarn",), **TINY)
    run.manifest["models"][0]["checkpoint"] = "my models/a; b"
    words = shlex.split(compare.missing_command(run))
    assert words[-2:] == ["--model", "other=my models/a; b@yarn:factor=8"]
    assert sum(word.startswith("yarn=") for word in words) == 1


def test_the_table_of_heads_shows_changes_from_the_baseline(client):
    with client.application.app_context():
        _, run, _, content = resolve_url("/heads", {"model": ["yarn"], "baseline": ["base"], "stat": ["ess2_1024"]})
    (table,) = [block for block in content.sections[""] if isinstance(block, HeadTable)]
    values = run.heads.set_index(["model", "layer", "head"])["ess2_1024"]
    for _, row in table.heads.iterrows():
        head = (row["layer"], row["head"])
        assert row["change"] == pytest.approx(values["yarn", *head] / values["base", *head])


@pytest.mark.slow
def test_comparisons_of_probes_are_on_the_compare_page(client):
    with client.application.app_context():
        sections = resolve_url("/compare", {})[3].sections
    assert list(sections) == ["", "Effective length at 1,024", "Position parameters", "Loss along the context"]
    titles = [[block.figure.layout.title.text for block in blocks] for heading, blocks in sections.items() if heading]
    assert titles[0][:2] == [
        "Effective length at 1,024 of each head, compared with base",
        "Rank by effective length at 1,024, before and after",
    ]
    assert titles[2] == ["Loss by position in the context", "Loss relative to base, by position"]


def test_a_training_is_on_the_checkpoints_page(tmp_path: Path):
    rows = {"adapter": "x", "step": [0, 1], "context_length": 64, "tokens": 48}
    with RunWriter.open(tmp_path, "adapt", {}) as writer:
        training = pd.DataFrame({**rows, "loss": [3.0, 2.9], "rate": 1.0})
        validation = pd.DataFrame({**rows, "doc": "d", "position": 63, "nll": [3.0, 2.9]})
        writer.add("all", {"training": training, "validation": validation})
        writer.commit(["all"], synthetic_manifest(("base",)))
    with create_app(tmp_path).server.app_context():
        sections = resolve_url("/checkpoints", {})[3].sections
    assert {heading: len(blocks) for heading, blocks in sections.items()} == {"": 0, "Training": 3}


@pytest.mark.slow
def test_checkpoints_with_mixed_lengths_are_detected(tmp_path: Path):
    runs = [
        synthetic_run(tmp_path, models=(name,), **TINY | {"lengths": lengths})
        for name, lengths in (("a", (256,)), ("b", (256, 512)), ("c", (256,)))
    ]
    assert has_mixed_lengths(combine_runs(runs[:2]).heads)
    assert not has_mixed_lengths(combine_runs(runs[::2]).heads)


def test_the_server_answers_only_to_loopback_names_and_sets_security_headers(client):
    assert client.get("/", headers={"Host": "127.0.0.1:8050"}).status_code == 200
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 400
    headers = client.get("/").headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe-eval" not in policy
    assert "'unsafe-inline'" not in policy.split("script-src")[1]
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("path", ["/assets/../app.py", "/assets/%2e%2e/app.py", "/assets//etc/passwd", "/../run.json"])
def test_urls_cannot_reach_files(client, path: str):
    text = client.get(path).get_data(as_text=True)
    assert "root:" not in text
    assert "format_version" not in text
    assert "import" not in text.split("<body>")[0]


def test_the_app_imports_no_plotly_and_its_callbacks_are_short():
    callbacks = []
    for file in SOURCES:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        imported = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in [*node.names, ast.alias(getattr(node, "module", "") or "")]
        }
        assert not any(name.startswith("plotly") for name in imported), file
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and any("callback" in ast.dump(item) for item in node.decorator_list):
                callbacks.append(node.name)
                assert node.end_lineno - node.lineno < 20, f"{file.name}: {node.name}"
    assert callbacks


@pytest.mark.slow
def test_findings_of_a_model_exclude_models_whose_expand_sources_the_same(tmp_path: Path):
    synthetic_run(tmp_path, models=("yarn", "yarn without factor"), **TINY)
    with create_app(tmp_path).server.app_context():
        _, _, _, content = resolve_url("/influence", {"model": "yarn"})
    (text,) = content.sections["In words"]
    assert text.sentences
    assert not any(sentence.startswith("yarn without") for sentence in text.sentences)


@pytest.mark.slow
def test_a_role_that_was_not_measured_is_shown_as_such(tmp_path: Path):
    both = synthetic_run(tmp_path / "whole", models=("base", "yarn"))
    tables = {name: both.table(name) for name in both.tables}
    tables["attention"] = tables["attention"][tables["attention"]["model"] != "yarn"]
    with RunWriter.open(tmp_path, "half", {}) as writer:
        writer.add("all", tables)
        writer.commit(["all"], both.manifest)
    with create_app(tmp_path).server.app_context():
        sections = resolve_url("/", {})[3].sections
    tables = [block for blocks in sections.values() for block in blocks if isinstance(block, TextTable)]
    (roles,) = (table for table in tables if table.column_names[0] == "role")
    cells = {row[0]: row[1:] for row in roles.rows}
    assert cells["local"][1] == "not measured"
    assert isinstance(cells["local"][0], Links)


@pytest.mark.slow
def test_a_run_without_models_is_shown_on_the_page_of_its_probe(tmp_path: Path):
    with RunWriter.open(tmp_path, "scaling", {}) as writer:
        keys = {"scheme": "nope", "regime": "i", "exponent": 0.9, "beta": 2.0, "context_length": 100, "seed": 0}
        writer.add(
            "all", {"scaling": pd.DataFrame([{**keys, "scale": 1.0, "target": 63.0, "ess": 70.0, "ratio": 1.1}])}
        )
        writer.commit(["all"], synthetic_manifest(()))
    with create_app(tmp_path).server.app_context():
        page, run, view, content = resolve_url("/scaling", {})
        assert content.title == "Scaling theorems"
        assert [type(block) for block in all_blocks(content)] == [TextBlock, Chart, TextBlock]  # headlines first
        assert control_names(build_controls(page, run, view)) == []
        overview = resolve_url("/", {})[3]
        assert overview.title == "Probes"
        filled = [name for name, blocks in overview.sections.items() if blocks]
        assert filled == ["In short", "In words", "Runs in this folder", "Run details"]
        for path in PATHS:
            assert export.render_page_html(resolve_url(path, {})[3], run, view).count("<h1>") == 1


# Runs


@pytest.mark.slow
def test_the_runs_page_lists_sizes_damaged_runs_and_differences(tmp_path: Path):
    runs = [synthetic_run(tmp_path, **TINY | {"docs": docs}) for docs in (2, 3)]
    damaged = synthetic_run(tmp_path, **TINY | {"docs": 1})
    (damaged.path / "run.json").write_text("{")
    (tmp_path / ".waiting-0a1b2c3d.partial" / "cells" / "base").mkdir(parents=True)
    with create_app(tmp_path).server.app_context():
        sections = resolve_url("/runs", {"run": [run.name for run in runs]})[3].sections
    chart, table = sections[""]
    rows = {row["run"]: row for row in table.rows}
    assert {link.partition("run=")[2] for links in chart.cell_links for link in links} == {run.name for run in runs}
    cells = dict(zip(chart.figure.data[0].x, chart.figure.data[0].customdata[-1, :, 0], strict=True))
    assert cells["Budget"] == sum(len(runs[0].table(name)) for name in runs[0].tables if name.startswith("budget"))
    states = {row["state"].split(",")[0].split(":")[0] for row in rows.values()}
    assert states == {"finished", "cannot be read", "unfinished"}
    row = rows[runs[0].name]
    assert row["MB"] == pytest.approx(sum(f.stat().st_size for f in runs[0].path.glob("*.parquet")) / 1e6, abs=0.01)
    assert (row["href"], row["models"]) == (f"/?run={runs[0].name}", "base, yarn")
    assert [sentence.split(":")[0] for sentence in sections["Damaged runs"][0].sentences] == [damaged.path.name]
    progress, advice = sections["Unfinished runs"]
    assert_names(progress.sentences[0], "waiting-0a1b2c3d", 1)
    assert "--resume" in advice.sentences[0]
    (differences,) = sections["Differences between the combined runs"]
    assert [*map(tuple, differences.rows)] == [("docs", "2", "3")]


# Selected heads


def test_selected_heads_are_listed_and_named_sets_compared(client, run: Run):
    query = {"heads": "1.2_0.3", "sets": ["first:1.2_2.0", "a:b:1.2_0.3_3.1"], "stat": "growth"}
    with client.application.app_context():
        page, run, view, content = resolve_url("/heads", query)
        (panel,) = with_class(all_components(page, run, content, view), "selected-heads")
    text = [item for item in walk(panel) if isinstance(item, str)]
    assert {"L0H3", "L1H2"} <= {*text}
    assert sum(item.startswith("2 ") for item in text) == 1
    (shared,) = [item for item in text if "first" in item and "a:b" in item]
    assert_names(shared, 1)
    sets = {name: {*heads} for name, heads in view.head_sets.items()}
    assert sets == {"first": {(1, 2), (2, 0)}, "a:b": {(1, 2), (0, 3), (3, 1)}}
    yarn = run.heads[run.heads["model"] == "yarn"].set_index(["layer", "head"])["growth"]
    assert statistic("growth").format_number(float(yarn.loc[[(1, 2), (2, 0)]].median())) in text


@pytest.mark.parametrize(("search", "is_saved"), [("?heads=1.2", True), ("?heads=x", False), ("?run=gone", False)])
def test_selected_heads_are_saved_only_if_there_are_some(folder: Path, run: Run, search: str, is_saved: bool):
    app = create_app(folder)
    output = next(name for name in app.callback_map if name.startswith("page-download.data@"))
    body = {
        "output": output,
        "outputs": {"id": "page-download", "property": output.removeprefix("page-download.")},
        "inputs": [{"id": "head-set-csv", "property": "n_clicks", "value": 1}],
        "state": [
            {"id": "url", "property": "pathname", "value": "/heads"},
            {"id": "url", "property": "search", "value": search},
        ],
        "changedPropIds": ["head-set-csv.n_clicks"],
    }
    reply = app.server.test_client().post("/_dash-update-component", json=body)
    assert reply.status_code == 200
    saved = [data["data"]["content"] for data in reply.get_json()["response"].values()]
    assert [len(content.splitlines()) for content in saved] == ([1 + len(run.models)] if is_saved else [])


# Probes of other packages


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Install probes for this test, after the probes of headscope."""
    built_in = dict(plugins.probes())

    def add(*probes: Probe) -> None:
        monkeypatch.setattr(plugins, "probes", lambda: built_in | {probe.name: probe for probe in probes})
        questions.cache_clear()

    yield add
    monkeypatch.undo()
    questions.cache_clear()


@pytest.fixture
def fresh(folder: Path, run: Run) -> Iterator[None]:
    """An app on a run that is not cached yet."""
    (run.path / "run.json").touch()
    with create_app(folder).server.app_context():
        yield


@pytest.mark.slow
def test_a_probe_of_another_package_gets_a_page_and_appears_on_others(install: Callable[..., None], fresh: None):
    install(Foreign())
    page, run, view, content = resolve_url("/foreign", {"models": ["yarn"]})
    controls = ("models", "layers", "role", "set")
    assert ([page.NAME for page in all_pages()][-3], page.controls(resolve_url("/", {})[1])) == ("Foreign", controls)
    assert (content.title, content.introduction) == ("Foreign matters", "What is foreign here.")
    assert list(content.sections) == ["", "At home", "Abroad", "Claims of the paper", "In words"]
    assert [(text.heading, *text.sentences) for text in content.sections["In words"]] == [
        ("Foreign matters", "There are 3 models.", "Foreign [red]danger."),
        ("Loss", "Foreign losses are like ours."),
    ]
    (chart,) = content.sections["At home"]
    assert chart.figure.layout.title.text == "At home with yarn"
    for tab, title in (("at-home", "At home with yarn"), ("abroad", "Abroad")):
        page, run, view, content = resolve_url("/foreign", {"models": ["yarn"], "tab": tab})
        graphs = [item for item in walk(all_components(page, run, content, view)) if isinstance(item, dcc.Graph)]
        assert [graph.figure.layout.title.text for graph in graphs] == [title]
    compared = resolve_url("/compare", {})[3].sections
    assert [block.figure.layout.title.text for block in compared["Abroad"]] == ["Abroad"]
    assert "At home" not in compared
    head = resolve_url("/head/1.2", {"model": "yarn"})[3]
    assert head.sections["Behaviour"][-1].figure.layout.title.text == "Foreign chart of 1.2 in yarn"
    (words,) = head.sections["In words"]
    assert words.collapsed
    assert "Foreign to yarn: L1H2." in words.sentences
    assert resolve_url("/", {})[3].sections["In words"][-1].heading == "Foreign matters"


def test_a_probe_may_have_its_own_page_or_none(install: Callable[..., None], fresh: None):
    install(WithPage())
    content = resolve_url("/foreign", {"model": "yarn"})[3]
    assert (content.title, content.introduction, [*content.sections]) == ("My own page", "yarn", [""])
    install(WithoutTab())
    with refuses(BadInput, "'/foreign'"):
        resolve_url("/foreign", {})


@pytest.mark.slow
def test_a_broken_probe_breaks_only_its_own_page(install: Callable[..., None], tmp_path: Path):
    run = synthetic_run(tmp_path, **TINY)

    def chart_titles(path: str) -> list[str]:
        blocks = all_blocks(resolve_url(path, {})[3])
        return [block.figure.layout.title.text for block in blocks if isinstance(block, Chart)]

    paths = ("/", "/heads", "/head", "/compare", "/retrieval", "/checkpoints", "/runs")  # one of each kind
    with create_app(tmp_path).server.app_context():
        before = {path: chart_titles(path) for path in paths}
        (run.path / "run.json").touch()  # so that it is not cached
        install(Broken(), Late(), Torn())
        with refuses(BrokenProbe, "'broken'", "'charts'"):
            resolve_url("/broken-matters", {})
        assert list(resolve_url("/foreign", {})[3].sections) == ["", "At home", "Claims of the paper", "In words"]
        for path, titles in before.items():
            assert set(titles) <= set(chart_titles(path))


@pytest.mark.parametrize("path", ["nothing/x.js", "dash/nothing.js", "dash/../../x", "dash_mantine_components/x.js"])
def test_an_unknown_component_file_is_not_found(path: str, tmp_path: Path) -> None:
    client = create_app(tmp_path).server.test_client()
    assert client.get(f"/_dash-component-suites/{path}", base_url="http://localhost").status_code == 404
