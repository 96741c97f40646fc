"""The app without a browser: what a URL means, what it may reach, and how the modules are made."""

import ast
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
from dash import dcc, html
from foreign_probe import BROKEN, LATE, PROBE

from dashboards import export, grid
from dashboards.app import create_app
from dashboards.controls import RANK_LINE_OPTIONS, build_controls
from dashboards.layout import all_pages, browser_state, page_shell, resolve_url
from dashboards.lazy_loading import RenderedPage, rendered_page
from dashboards.pages import checkpoints, compare, probe
from dashboards.run_store import current_store
from dashboards.view_state import FILTER_PARAMETERS, ViewState, parse_head
from headscope import plugins
from headscope.errors import BadInput, BrokenProbe
from headscope.report import assembly
from headscope.report.assembly import measured_statistics
from headscope.report.blocks import Chart, HeadTable, Links, PageContent, TextBlock, TextTable
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run, concatenate
from headscope.runs.synthetic import manifest, synthetic_run
from headscope.runs.writer import RunWriter

PATHS = [page.PATH for page in all_pages()]
DRAWN = ("/", "/heads", "/head", "/compare", "/retrieval", "/influence")
"""Pages with a chart for any run of models."""
ROOT = Path(__file__).parent.parent
TINY = {"layers": 2, "heads": 4, "groups": 2, "pairs": 2, "lengths": (256,), "docs": 2}
SOURCES = sorted((ROOT / "dashboards").rglob("*.py"))
assert SOURCES


def parts(content: PageContent) -> list:
    return [part for group in content.sections.values() for part in group]


def body(page, run: Run, content: PageContent, view: ViewState) -> list:
    """The page's components."""
    drawn = RenderedPage("", page, run, view, content)
    return [*drawn.initial_components(), *drawn.deferred_components()]


def walk(component) -> Iterator:
    """The component, or components, and all inside."""
    for each in component if isinstance(component, list | tuple) else [component]:
        yield each
        if (inside := getattr(each, "children", None)) is not None:
            yield from walk(inside)


def controlled(component) -> bool:
    return isinstance(getattr(component, "id", None), dict) and "control" in component.id


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return synthetic_run(folder, models=("base", "yarn", "learned"), pairs=2)


@pytest.fixture(scope="module")
def client(folder: Path, run: Run):
    return create_app(folder).server.test_client()


def test_without_a_query_the_view_has_defaults(run: Run):
    view = ViewState.from_query({}, run)
    assert (view.model, view.statistic_name, view.baseline) == ("learned", "ess2_1024", None)
    assert not view.has_filters
    assert view.filter_heads(run.heads).equals(run.heads)


def test_filters_are_judged_by_the_model_and_hold_for_all(run: Run):
    query = {"model": "yarn", "stat": "growth", "layers": "1-2", "low": "0.2", "high": "0.9"}
    kept = ViewState.from_query(query, run).filter_heads(run.heads)
    mine = run.heads[(run.heads["model"] == "yarn") & run.heads["layer"].between(1, 2)]
    wanted = mine[mine["growth"].between(0.2, 0.9)][["layer", "head"]]
    for _, block in kept.groupby("model", observed=True):
        assert block[["layer", "head"]].to_numpy().tolist() == wanted.to_numpy().tolist()


def test_masked_heads_keep_their_place_and_lose_their_numbers(run: Run):
    view = ViewState.from_query({"layers": "0-1"}, run)
    masked = view.mask_filtered(run.heads)
    assert len(masked) == len(run.heads)
    assert masked.loc[masked["layer"] > 1, "growth"].isna().all()
    assert masked.loc[masked["layer"] <= 1, "growth"].notna().all()


def test_links_keep_the_state_and_leave_out_what_they_are_told_to(run: Run):
    view = ViewState.from_query({"model": "yarn", "pick": "1.2_0.3", "role": "local"}, run)
    assert view.selected_heads == {(1, 2), (0, 3)}
    assert view.head_link(3, 2) == "/head/3.2?model=yarn&pick=1.2_0.3"
    assert view.link("", *FILTER_PARAMETERS) == "?model=yarn&pick=1.2_0.3"


@pytest.mark.parametrize(("at", "place"), [("3.2", (3, 2)), ("3.g1", (3, 3)), ("0.g0", (0, 0))])
def test_a_path_names_a_head_or_a_key_group(run: Run, at: str, place: tuple[int, int]):
    assert parse_head(at, run) == place


@pytest.mark.parametrize("at", ["", "3", "3.2.1", "-1.0", "3.6", "4.0", "3.g2", "a.b", "3.2/../..", "١.٢"])
def test_other_paths_are_refused_by_name(run: Run, at: str):
    with pytest.raises(BadInput, match=r"names no head: write layer\.head|this run has no (head|key group) "):
        parse_head(at, run)


def test_only_statistics_with_a_number_can_be_chosen(run: Run):
    offered = measured_statistics(run.heads)
    assert offered[:2] == ["ess2_1024", "ess2_256"]
    assert all(run.heads[name].notna().any() for name in offered)


def test_only_pages_that_say_something_of_heads_have_filters_of_heads(run: Run):
    offered = {page.PATH: {*page.controls(run)} & {*FILTER_PARAMETERS} for page in probe.probe_pages()}
    assert offered["/retrieval"] == {"layers", "role"}
    assert offered["/tasks"] == set()


def test_the_pages_are_in_their_place():
    links = [part for part in walk(page_shell()) if isinstance(part, html.A) and "keep" in (part.className or "")]
    there = [(link.children, link.href) for link in links[1:]]
    ours = [
        ("Overview", "/"),
        ("Heads", "/heads"),
        ("Head", "/head"),
        ("Compare", "/compare"),
        ("Checkpoints", "/checkpoints"),
        ("Runs", "/runs"),
        ("Retrieval", "/retrieval"),
        ("Influence", "/influence"),
        ("Window", "/window"),
        ("Scaling", "/scaling"),
    ]
    assert [each for each in there if each in ours] == ours


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kept", ["some", "none"])
def test_every_page_survives_filters_says_what_they_leave_out_and_is_saved_as_one_file(client, path: str, kept: str):
    query = {"model": "yarn", "base": "base", "stat": "growth", "layers": "1-2", "role": "local", "pick": "1.2_0.3"}
    if kept == "none":
        query["low"] = "99"
    with client.application.app_context():
        page, run, view, content = resolve_url(path, query)
        shown = body(page, run, content, view)
        steers = [part.id["control"] for part in walk(build_controls(page, run, view)) if controlled(part)]
    assert steers == ["run", *page.controls(run)]
    told = [each.children for each in shown if "note" in (getattr(each, "className", "") or "")]
    filters = {"layers", "role", *(["low"] if kept == "none" else [])}
    if foreign := filters - {*steers}:
        assert any(str(each).startswith("Left out, as it is no filter of this page") for each in told)
        assert all(name in str(told) for name in foreign)
    if view.has_filters:
        ((what, link),) = [each for each in told if isinstance(each, list)]
        assert "of 24 heads are shown, those in layers 1 to 2, that are local in" in what
        assert link.href == f"?model=yarn&base=base&stat=growth&pick=1.2_0.3&run={run.name}"
    assert sum(isinstance(part, dcc.Graph) for part in walk(shown)) == sum(isinstance(p, Chart) for p in parts(content))
    if path in DRAWN:
        assert any(isinstance(part, Chart) for part in parts(content))
    lead = shown[1].children
    assert ("No head passes the filters." in lead) == (kept == "none" and path in ("/heads", "/compare"))
    saved = export.render_page_html(content, run, view)
    assert saved.count("<h1>") == 1
    assert saved.count("data-figure=") == sum(isinstance(part, Chart) for part in parts(content))
    assert "http://" not in saved.split("<script")[0].replace("http://www.w3.org", "")


# Every view


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that share a label; influence is known of one model alone, retrieval of another."""
    folder = tmp_path_factory.mktemp("uneven")
    size = {"layers": 4, "heads": 4, "groups": 4, "pairs": 2, "lengths": (256,), "docs": 3}
    made = synthetic_run(tmp_path_factory.mktemp("whole"), models=("base", "learned"), **size)
    tables = {name: made.table(name) for name in made.tables}
    tables["influence"] = tables["influence"][tables["influence"]["model"] == "learned"]
    tables["influence_sets"] = tables["influence_sets"][tables["influence_sets"]["model"] == "learned"]
    for name in ("needles", "retrieval", "needle_ablation"):
        tables[name] = tables[name][tables[name]["model"] == "base"]
    with RunWriter.open(folder, "uneven", {}) as writer:
        writer.add("all", tables)
        writer.commit(["all"], manifest(made.models, layers=4, heads=4, groups=4))
    synthetic_run(folder, models=("base", "ntk"), seed=1, **size)
    return folder


@pytest.mark.parametrize("joined", [False, True], ids=["one run", "joined runs"])
def test_every_view_can_be_shown(uneven: Path, joined: bool, monkeypatch: pytest.MonkeyPatch):
    """Every page under every value of its controls, and every two of them together, as the app builds it.

    Of three together each kind once: who of model and baseline has the statistic, and how it is drawn. Where runs are
    joined, one statistic of those that the same models have and that are drawn alike stands for all.
    """
    for module, name, keys in STEADY:
        monkeypatch.setattr(module, name, _once(getattr(module, name), keys))
    with create_app(uneven).server.app_context():
        names = sorted((path.name for path in uneven.iterdir()), key=lambda name: "-uneven-" not in name)
        runs = names if joined else names[:1]
        run = resolve_url("/", {"run": runs})[1]
        assert joined == any("base · " in label for label in run.models)
        seen = 0
        for page in all_pages():
            for query in _queries(page, run):
                _, run, view, content = resolve_url(page.PATH, {"run": runs, **query})
                assert body(page, run, content, view)[0].children == content.title, query
                assert build_controls(page, run, view)
                assert browser_state(page.PATH, page, run, view, content)["address"].count("run=") == len(runs)
                assert not view.notes
                assert parts(content) or content.introduction, f"{page.PATH} {query} is empty"
                seen += 1
        assert seen > 90


STEADY = (
    (assembly, "charts_on", lambda shown, page: (page, *shown.models, shown.model)),
    (compare, "box_chart", lambda shown, name: (name, *shown.models)),
    (compare, "_by_layer", lambda shown, name: (name, *shown.models)),
)
"""What does not ask for all that is in view, and is slow to draw: drawn once for what it asks for."""


def _once(draw: Callable, key: Callable) -> Callable:
    drawn: dict = {}

    def found(*arguments):
        if (at := key(*arguments)) not in drawn:
            drawn[at] = draw(*arguments)
        return drawn[at]

    return found


def _queries(page, run: Run) -> Iterator[dict[str, str]]:
    """Every two values of its controls together; of three every kind."""
    steers, stats = page.controls(run), measured_statistics(run.heads)
    if len(run.parts) > 1:
        stats = [*{(*assembly.models_with_statistic(run, stat), *_looks(run, stat)): stat for stat in stats}.values()]
    yield {}
    if "stat" not in steers:
        yield from ({"model": model} for model in run.models if "model" in steers)
        return
    models, bases, seen = run.models if "model" in steers else [""], ["", *run.models], set()
    for at, stat in enumerate(stats):
        for shift, model in enumerate(models):
            base = bases[(at + shift) % len(bases)]
            seen.add(_kind(run, model, base, stat))
            yield _told(model, base, stat, RANK_LINE_OPTIONS[at % 2]["value"] if "lines" in steers else "")
    for model, base, stat in product(models, bases, stats):
        if (kind := _kind(run, model, base, stat)) not in seen:
            seen.add(kind)
            yield _told(model, base, stat, "")


def _told(model: str, base: str, stat: str, lines: str) -> dict[str, str]:
    asked = {"model": model, "base": base, "stat": stat, "lines": lines}
    return {name: value for name, value in asked.items() if value}


def _kind(run: Run, model: str, base: str, stat: str) -> tuple:
    """What decides how a statistic is drawn of a model against a baseline."""
    having = assembly.models_with_statistic(run, stat)
    who = model in having, base in having, base == "", model == base, len(having) < len(run.models)
    return *who, *_looks(run, stat)


def _looks(run: Run, stat: str) -> tuple[bool, bool, bool]:
    return statistic(stat).log_scale, statistic(stat).signed, f"{stat}_low" in run.heads


def test_a_statistic_that_a_model_lacks_says_who_has_it_and_what_would_measure_it(uneven: Path):
    with create_app(uneven).server.app_context():
        name = next(path.name for path in uneven.iterdir() if "-uneven-" in path.name)
        _, _, _, content = resolve_url("/heads", {"run": name, "model": "base", "stat": "influence_joint"})
    (words,) = [part for part in parts(content) if isinstance(part, TextBlock)]
    assert words.sentences[0] == "Of base there is no influence in these runs; of learned there is."
    assert "headscope influence --model" in words.sentences[1]
    assert [link.href for link in words.links.links] == [f"?run={name}&model=learned&stat=influence_joint"]


def test_a_view_that_fails_is_told_and_no_other_is_left_under_its_controls(
    client, run: Run, monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr("dashboards.pages.heads.content", broken)
    output = "..content.children...controls.children...shown.data.."
    asked = {
        "output": output,
        "outputs": [{"id": i, "property": p} for i, p in (each.split(".") for each in output[2:-2].split("..."))],
        "inputs": [
            {"id": "url", "property": "pathname", "value": "/heads"},
            {"id": "url", "property": "search", "value": ""},
        ],
        "state": [{"id": "shown", "property": "data", "value": None}],
        "changedPropIds": ["url.pathname"],
    }
    answer = client.post("/_dash-update-component", json=asked)
    assert answer.status_code == 200
    said = answer.get_json()["response"]
    assert "RuntimeError: out of order" in str(said["content"])
    assert said["controls"]["children"] == []


def test_what_fills_a_window_comes_at_once_and_the_rest_when_it_is_asked_for(client, run: Run):
    search = f"?run={run.name}"
    with client.application.app_context():
        drawn = rendered_page("/compare", search)
        assert rendered_page("/compare", search) is drawn, "what was drawn is kept"
        (place,) = [p.id for p in walk(drawn.initial_components()) if isinstance(getattr(p, "id", None), dict) and "rest" in p.id]
        first = [part.figure.layout.title.text for part in walk(drawn.initial_components()) if isinstance(part, dcc.Graph)]
        every = [part.figure.layout.title.text for part in parts(drawn.content) if isinstance(part, Chart)]
    assert place == {"rest": f"/compare{search}"}
    asked = {
        "output": '{"rest":["MATCH"]}.children',
        "outputs": {"id": place, "property": "children"},
        "inputs": [{"id": place, "property": "n_clicks", "value": 1}],
        "state": [{"id": place, "property": "id", "value": place}],
        "changedPropIds": [],
    }
    (answer,) = client.post("/_dash-update-component", json=asked).get_json()["response"].values()
    assert 0 < len(first) < len(every)
    assert str(answer).count("'figure': {") == len(every) - len(first)


def test_a_page_that_fails_half_way_is_not_kept(client, run: Run):
    def broken(*_: object) -> None:
        raise RuntimeError("out of order")

    with client.application.app_context():
        drawn = rendered_page("/heads", "?model=yarn")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dashboards.lazy_loading.component", broken)
            with pytest.raises(RuntimeError, match="out of order"):
                drawn.initial_components()
        assert any(isinstance(part, dcc.Graph) for part in walk(rendered_page("/heads", "?model=yarn").initial_components()))


def test_a_kept_page_is_drawn_anew_when_a_run_is_added(tmp_path: Path):
    synthetic_run(tmp_path, **TINY)
    with create_app(tmp_path).server.app_context():
        before = rendered_page("/runs", "")
        assert rendered_page("/runs", "") is before
        synthetic_run(tmp_path, **TINY, seed=1)
        assert rendered_page("/runs", "") is not before


# The URL is the state


def test_the_newest_run_is_named_once_and_a_newer_one_is_offered(tmp_path: Path):
    first = synthetic_run(tmp_path, **TINY)
    with create_app(tmp_path).server.app_context():
        page, run, view, content = resolve_url("/heads", {})
        address = browser_state("/heads", page, run, view, content)["address"]
        assert address == f"?run={first.name}"
        synthetic_run(tmp_path, **TINY, seed=1).path.rename(tmp_path / "29991231T000000Z-new-00000000")
        page, run, view, content = resolve_url("/heads", {"run": first.name})
        assert run.name == first.name
        (offer,) = [p for p in walk(build_controls(page, run, view)) if getattr(p, "className", "") == "offer"]
        assert offer.children[1].href == "?run=29991231T000000Z-new-00000000"


def test_a_run_is_opened_first_though_others_are_newer_and_those_are_not_offered(tmp_path: Path):
    first = synthetic_run(tmp_path, **TINY)
    synthetic_run(tmp_path, **TINY, seed=1).path.rename(tmp_path / "29991231T000000Z-new-00000000")
    for place, name in ((tmp_path, "29991231T000000Z-new-00000000"), (first.path, first.name)):
        with create_app(place).server.app_context():
            page, run, view, _ = resolve_url("/heads", {})
            assert run.name == name
            assert not [p for p in walk(build_controls(page, run, view)) if getattr(p, "className", "") == "offer"]
            assert len(current_store().list_runs()) == 2


def test_the_grid_is_saved_as_it_is_sorted_and_filtered(run: Run):
    columns = (
        '{"growth": {"type": "greaterThan", "filter": 0.3}, "layer": {"type": "inRange", "filter": 0, "filterTo": 3}}'
    )
    view = ViewState.from_query({"sort": "growth-desc", "columns": columns, "pick": "1.2_1.3_2.4_2.5"}, run)
    heads = run.heads[run.heads["model"] == "yarn"]
    shown = grid.visible_rows(heads, view)
    wanted = heads[heads["layer"].isin([1, 2]) & (heads["growth"] > 0.3)]
    wanted = wanted[[place in view.selected_heads for place in zip(wanted["layer"], wanted["head"], strict=True)]]
    assert shown["growth"].tolist() == sorted(wanted["growth"], reverse=True)
    either = {"operator": "OR", "conditions": [{"type": "lessThan", "filter": 1}, {"type": "blank"}]}
    view = ViewState.from_query({"columns": json.dumps({"layer": either})}, run)
    assert set(grid.visible_rows(heads, view)["layer"]) == {0}


@pytest.mark.parametrize("path", ["/window", "/scaling"])
def test_a_page_without_its_tables_names_the_command_that_makes_them(client, path: str):
    with client.application.app_context():
        page, run, view, content = resolve_url(path, {})
        (told,) = parts(content)
        assert [part.id["control"] for part in walk(build_controls(page, run, view)) if controlled(part)] == ["run"]
    assert isinstance(told, TextBlock)
    assert told.sentences[0].endswith(f"headscope {path[1:]}")


def test_the_grid_compares_with_the_pinned_baseline(client):
    with client.application.app_context():
        _, run, _, content = resolve_url("/heads", {"model": ["yarn"], "base": ["base"], "stat": ["ess2_1024"]})
    (grid,) = [part for part in content.sections[""] if isinstance(part, HeadTable)]
    wide = run.heads.set_index(["model", "layer", "head"])["ess2_1024"]
    for _, row in grid.heads.iterrows():
        place = (row["layer"], row["head"])
        assert row["change"] == pytest.approx(wide["yarn", *place] / wide["base", *place])


def test_what_probes_compare_is_on_the_page_that_compares(client):
    with client.application.app_context():
        sections = resolve_url("/compare", {})[3].sections
    assert list(sections) == ["Effective length at 1,024", "Position parameters", "Loss along the context"]
    titles = [[part.figure.layout.title.text for part in group] for group in sections.values()]
    assert titles[0][:2] == [
        "Effective length at 1,024 of each head, compared with base",
        "Rank by effective length at 1,024, before and after",
    ]
    assert titles[2] == ["Loss by position in the context", "Loss relative to base, by position"]


def test_a_training_is_on_the_page_of_checkpoints(tmp_path: Path):
    rows = {"adapter": "x", "step": [0, 1], "context_length": 64, "tokens": 48}
    with RunWriter.open(tmp_path, "adapt", {}) as writer:
        training = pd.DataFrame({**rows, "loss": [3.0, 2.9], "rate": 1.0})
        validation = pd.DataFrame({**rows, "doc": "d", "position": 63, "nll": [3.0, 2.9]})
        writer.add("all", {"training": training, "validation": validation})
        writer.commit(["all"], manifest(("base",)))
    with create_app(tmp_path).server.app_context():
        sections = resolve_url("/checkpoints", {})[3].sections
    assert {heading: len(group) for heading, group in sections.items()} == {"Training": 3}


def test_checkpoints_that_were_measured_at_other_lengths_are_told_of(tmp_path: Path):
    parts = [
        synthetic_run(tmp_path, models=(name,), **TINY | {"lengths": lengths})
        for name, lengths in (("a", (256,)), ("b", (256, 512)), ("c", (256,)))
    ]
    assert checkpoints.has_mixed_lengths(concatenate(parts[:2]).heads)
    assert not checkpoints.has_mixed_lengths(concatenate(parts[::2]).heads)


def test_the_server_answers_only_to_loopback_names_and_closes_its_pages(client):
    assert client.get("/", headers={"Host": "127.0.0.1:8050"}).status_code == 200
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 400
    headers = client.get("/").headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe-eval" not in policy
    assert "'unsafe-inline'" not in policy.split("script-src")[1]
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("path", ["/assets/../app.py", "/assets/%2e%2e/app.py", "/assets//etc/passwd", "/../run.json"])
def test_no_path_reaches_a_file(client, path: str):
    text = client.get(path).get_data(as_text=True)
    assert "root:" not in text
    assert "format_version" not in text
    assert "import" not in text.split("<body>")[0]


def test_the_app_draws_nothing_itself_and_its_callbacks_are_short():
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
            if isinstance(node, ast.FunctionDef) and any("callback" in ast.dump(each) for each in node.decorator_list):
                callbacks.append(node.name)
                assert node.end_lineno - node.lineno < 20, f"{file.name}: {node.name}"
    assert callbacks


def test_the_findings_of_a_model_are_not_those_of_one_whose_name_begins_alike(tmp_path: Path):
    synthetic_run(tmp_path, models=("yarn", "yarn without factor"), **TINY)
    with create_app(tmp_path).server.app_context():
        _, _, _, content = resolve_url("/influence", {"model": "yarn"})
    (told,) = content.sections[""]
    assert told.sentences
    assert not any(sentence.startswith("yarn without") for sentence in told.sentences)


def test_what_was_not_measured_of_a_model_is_not_called_none(tmp_path: Path):
    both = synthetic_run(tmp_path / "whole", models=("base", "yarn"))
    writer = {name: both.table(name) for name in both.tables}
    writer["attention"] = writer["attention"][writer["attention"]["model"] != "yarn"]
    with RunWriter.open(tmp_path, "half", {}) as stored:
        stored.add("all", writer)
        stored.commit(["all"], both.manifest)
    with create_app(tmp_path).server.app_context():
        sections = resolve_url("/", {})[3].sections
    listings = [part for group in sections.values() for part in group if isinstance(part, TextTable)]
    (roles,) = (part for part in listings if part.column_names[0] == "role")
    cells = {row[0]: row[1:] for row in roles.rows}
    assert cells["local"][1] == "not measured"
    assert isinstance(cells["local"][0], Links)


def test_a_run_without_models_is_shown_by_its_probes_page(tmp_path: Path):
    with RunWriter.open(tmp_path, "scaling", {}) as writer:
        same = {"scheme": "nope", "regime": "i", "exponent": 0.9, "beta": 2.0, "context_length": 100, "seed": 0}
        writer.add(
            "all", {"scaling": pd.DataFrame([{**same, "scale": 1.0, "target": 63.0, "ess": 70.0, "ratio": 1.1}])}
        )
        writer.commit(["all"], manifest(()))
    with create_app(tmp_path).server.app_context():
        page, run, view, content = resolve_url("/scaling", {})
        assert content.title == "Scaling theorems"
        assert [type(part) for part in parts(content)] == [TextBlock, Chart]
        assert [part.id["control"] for part in walk(build_controls(page, run, view)) if controlled(part)] == ["run"]
        overview = resolve_url("/", {})[3]
        assert overview.title == "Probes"
        filled = [name for name, group in overview.sections.items() if group]
        assert filled == ["What was found", "Runs in this folder", "How it was made"]
        for path in PATHS:
            assert export.render_page_html(resolve_url(path, {})[3], run, view).count("<h1>") == 1


# Runs


def test_the_page_of_runs_tells_sizes_what_is_damaged_and_how_two_differ(tmp_path: Path):
    made = [synthetic_run(tmp_path, **TINY | {"docs": docs}) for docs in (2, 3)]
    torn = synthetic_run(tmp_path, **TINY | {"docs": 1})
    (torn.path / "run.json").write_text("{")
    (tmp_path / ".waiting-0a1b2c3d.partial" / "cells" / "base").mkdir(parents=True)
    with create_app(tmp_path).server.app_context():
        sections = resolve_url("/runs", {"run": [run.name for run in made]})[3].sections
    (table,) = sections[""]
    rows = {row["run"]: row for row in table.rows}
    assert {row["state"].split(",")[0].split(":")[0] for row in rows.values()} == {
        "finished",
        "cannot be read",
        "unfinished",
    }
    mine = rows[made[0].name]
    assert mine["MB"] == pytest.approx(sum(f.stat().st_size for f in made[0].path.glob("*.parquet")) / 1e6, abs=0.01)
    assert (mine["href"], mine["models"]) == (f"/?run={made[0].name}", "base, yarn")
    assert any("--resume" in sentence for sentence in sections["Damaged and unfinished"][0].sentences)
    (differ,) = sections["How the chosen runs differ"]
    assert [*map(tuple, differ.rows)] == [("docs", "2", "3")]


# Picked heads


def test_picked_heads_are_named_and_sets_of_them_compared(client, run: Run):
    query = {"pick": "1.2_0.3", "sets": ["mine:1.2_2.0", "a:b:1.2_0.3_3.1"], "stat": "growth"}
    with client.application.app_context():
        page, run, view, content = resolve_url("/heads", query)
        shown = body(page, run, content, view)
    (box,) = [part for part in shown if getattr(part, "className", "") == "tray"]
    text = [part for part in walk(box) if isinstance(part, str)]
    assert {"2 picked heads: ", "L0H3", "L1H2", "mine and a:b share 1 heads."} <= {*text}
    assert view.head_sets == {"mine": {(1, 2), (2, 0)}, "a:b": {(1, 2), (0, 3), (3, 1)}}
    yarn = run.heads[run.heads["model"] == "yarn"].set_index(["layer", "head"])["growth"]
    assert statistic("growth").number(float(yarn.loc[[(1, 2), (2, 0)]].median())) in text


# Probes that the app does not know


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install probes for this test, behind ours."""
    ours = dict(plugins.probes())

    def add(*probes: plugins.Probe) -> None:
        monkeypatch.setattr(plugins, "probes", lambda: ours | {probe.name: probe for probe in probes})

    return add


@pytest.fixture
def fresh(folder: Path, run: Run) -> Iterator[None]:
    """An app on runs that nobody has read yet."""
    (run.path / "run.json").touch()
    with create_app(folder).server.app_context():
        yield


def test_a_foreign_probe_gets_a_page_and_its_place_on_others(install: Callable[..., None], fresh: None):
    install(PROBE)
    page, run, view, content = resolve_url("/foreign", {"models": ["yarn"]})
    steers = ("models", "layers", "role")
    assert ([page.NAME for page in all_pages()][-3], page.controls(resolve_url("/", {})[1])) == ("Foreign", steers)
    assert (content.title, content.introduction) == ("Foreign matters", "What is foreign here.")
    assert list(content.sections) == ["", "At home", "Abroad"]
    assert [(words.heading, *words.sentences) for words in content.sections[""]] == [
        ("", "There are 3 models."),
        ("Loss", "Foreign losses are like ours."),
    ]
    (chart,) = content.sections["At home"]
    assert chart.figure.layout.title.text == "At home with yarn"
    assert sum(isinstance(part, dcc.Graph) for part in walk(body(page, run, content, view))) == 2
    compared = resolve_url("/compare", {})[3].sections
    assert [part.figure.layout.title.text for part in compared["Abroad"]] == ["Abroad"]
    assert "At home" not in compared
    head = resolve_url("/head/1.2", {"model": "yarn"})[3]
    assert head.sections["What it does"][-1].figure.layout.title.text == "Foreign chart of 1.2 in yarn"
    assert "Foreign to yarn: 1.2." in head.introduction
    assert resolve_url("/", {})[3].sections["What was found"][-1].heading == "Foreign matters"


def test_a_probe_may_draw_its_own_page_or_have_none(install: Callable[..., None], fresh: None):
    install(replace(PROBE, page="foreign_probe:page"))
    content = resolve_url("/foreign", {"model": "yarn"})[3]
    assert (content.title, content.introduction, [*content.sections]) == ("My own page", "yarn", [""])
    install(replace(PROBE, tab=None))
    with pytest.raises(BadInput, match="no page"):
        resolve_url("/foreign", {})


def test_a_broken_probe_breaks_its_own_page_alone(install: Callable[..., None], fresh: None, run: Run):
    def drawn(path: str) -> list[str]:
        return [part.figure.layout.title.text for part in parts(resolve_url(path, {})[3]) if isinstance(part, Chart)]

    some = ("/", "/heads", "/head", "/compare", "/retrieval", "/checkpoints", "/runs")  # one of each kind
    before = {path: drawn(path) for path in some}
    (run.path / "run.json").touch()  # so that it is read anew
    install(BROKEN, LATE, replace(PROBE, name="torn", tab="Torn", page="foreign_probe:failing"))
    with pytest.raises(BrokenProbe, match="'broken': its charts"):
        resolve_url("/broken-matters", {})
    assert list(resolve_url("/foreign", {})[3].sections) == ["", "At home"]
    for path, titles in before.items():
        assert set(titles) <= set(drawn(path))
