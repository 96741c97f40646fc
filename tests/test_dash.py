"""The app without a browser: what a URL means, what it may reach, and how the modules are made."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from dash import dcc, html
from foreign_probe import BROKEN, LATE, PROBE

from dashboards import saving
from dashboards.app import create
from dashboards.frame import body, controls, leads_to, pages, shell
from dashboards.view import FILTERS, View, place_of
from headscope import door
from headscope.errors import BadInput, BrokenProbe
from headscope.report.content import Chart, Content, Grid, Words
from headscope.report.outline import measured
from headscope.runs.run import Run
from headscope.runs.synthetic import manifest, synthetic_run
from headscope.runs.writer import RunWriter

PATHS = [page.PATH for page in pages()]
DRAWN = ("/heads", "/head", "/compare", "/retrieval", "/influence")
"""Pages with a chart for any run of models."""
ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "dashboards").rglob("*.py"))
assert SOURCES


def parts(content: Content) -> list:
    return [part for group in content.sections.values() for part in group]


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
    return synthetic_run(folder, models=("base", "yarn", "learned"))


@pytest.fixture(scope="module")
def client(folder: Path, run: Run):
    return create(folder).server.test_client()


def test_without_a_query_the_view_has_defaults(run: Run):
    view = View.of({}, run)
    assert (view.model, view.stat, view.base) == ("learned", "ess2_1024", None)
    assert not view.filtering
    assert view.kept(run.heads).equals(run.heads)


def test_filters_are_judged_by_the_model_and_hold_for_all(run: Run):
    query = {"model": "yarn", "stat": "growth", "layers": "1-2", "low": "0.2", "high": "0.9"}
    kept = View.of(query, run).kept(run.heads)
    mine = run.heads[(run.heads["model"] == "yarn") & run.heads["layer"].between(1, 2)]
    wanted = mine[mine["growth"].between(0.2, 0.9)][["layer", "head"]]
    for _, block in kept.groupby("model", observed=True):
        assert block[["layer", "head"]].to_numpy().tolist() == wanted.to_numpy().tolist()


def test_masked_heads_keep_their_place_and_lose_their_numbers(run: Run):
    view = View.of({"layers": "0-1"}, run)
    masked = view.masked(run.heads)
    assert len(masked) == len(run.heads)
    assert masked.loc[masked["layer"] > 1, "growth"].isna().all()
    assert masked.loc[masked["layer"] <= 1, "growth"].notna().all()


def test_links_keep_the_state_and_leave_out_what_they_are_told_to(run: Run):
    view = View.of({"model": "yarn", "pick": "1.2_0.3", "role": "local"}, run)
    assert view.picked == {(1, 2), (0, 3)}
    assert view.head_link(3, 2) == "/head/3.2?model=yarn&pick=1.2_0.3&role=local"
    assert view.link("", *FILTERS) == "?model=yarn"


@pytest.mark.parametrize(("at", "place"), [("3.2", (3, 2)), ("3.g1", (3, 3)), ("0.g0", (0, 0))])
def test_a_path_names_a_head_or_a_key_group(run: Run, at: str, place: tuple[int, int]):
    assert place_of(at, run) == place


@pytest.mark.parametrize("at", ["", "3", "3.2.1", "-1.0", "3.6", "4.0", "3.g2", "a.b", "3.2/../..", "١.٢"])
def test_other_paths_are_refused_by_name(run: Run, at: str):
    with pytest.raises(BadInput, match=r"names no head: write layer\.head|this run has no (head|key group) "):
        place_of(at, run)


def test_only_statistics_with_a_number_can_be_chosen(run: Run):
    offered = measured(run.heads)
    assert offered[:2] == ["ess2_1024", "ess2_256"]
    assert all(run.heads[name].notna().any() for name in offered)


def test_the_pages_are_in_their_place():
    links = [part for part in walk(shell()) if isinstance(part, html.A) and "keep" in (part.className or "")]
    assert [(link.children, link.href) for link in links[1:]] == [
        ("Overview", "/"),
        ("Heads", "/heads"),
        ("Head", "/head"),
        ("Compare", "/compare"),
        ("Retrieval", "/retrieval"),
        ("Influence", "/influence"),
        ("Window", "/window"),
        ("Scaling", "/scaling"),
        ("Checkpoints", "/checkpoints"),
    ]


@pytest.mark.parametrize("path", PATHS)
def test_every_page_can_be_saved_as_one_file(client, path: str):
    with client.application.app_context():
        _, run, view, content = leads_to(path, {})
    saved = saving.saved(content, run, view)
    assert saved.count("<h1>") == 1
    assert saved.count("data-figure=") == sum(isinstance(part, Chart) for part in parts(content))
    assert "http://" not in saved.split("<script")[0].replace("http://www.w3.org", "")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kept", ["some", "none"])
def test_every_page_survives_filters(client, path: str, kept: str):
    query = {"model": "yarn", "base": "base", "stat": "growth", "layers": "1-2", "role": "local", "pick": "1.2_0.3"}
    if kept == "none":
        query["low"] = "99"
    with client.application.app_context():
        page, run, view, content = leads_to(path, query)
        shown = body(page, content, view)
        assert [part.id["control"] for part in walk(controls(page, run, view)) if controlled(part)] == [
            "run",
            *page.CONTROLS,
        ]
    assert any(isinstance(part, html.A) and part.href == "?model=yarn&base=base&stat=growth" for part in walk(shown))
    assert sum(isinstance(part, dcc.Graph) for part in walk(shown)) == sum(isinstance(p, Chart) for p in parts(content))
    assert any(isinstance(part, Chart) for part in parts(content)) == (path in DRAWN)
    lead = shown[1].children
    assert ("No head passes the filters." in lead) == (kept == "none" and path in ("/heads", "/compare"))


@pytest.mark.parametrize("path", ["/window", "/scaling"])
def test_a_page_without_its_tables_names_the_command_that_makes_them(client, path: str):
    with client.application.app_context():
        page, run, view, content = leads_to(path, {})
        (told,) = parts(content)
        assert [part.id["control"] for part in walk(controls(page, run, view)) if controlled(part)] == ["run"]
    assert isinstance(told, Words)
    assert told.sentences[0].endswith(f"headscope {path[1:]}")


def test_the_grid_compares_with_the_pinned_baseline(client):
    with client.application.app_context():
        _, run, _, content = leads_to("/heads", {"model": ["yarn"], "base": ["base"], "stat": ["ess2_1024"]})
    (grid,) = [part for part in content.sections[""] if isinstance(part, Grid)]
    wide = run.heads.set_index(["model", "layer", "head"])["ess2_1024"]
    for _, row in grid.heads.iterrows():
        place = (row["layer"], row["head"])
        assert row["change"] == pytest.approx(wide["yarn", *place] / wide["base", *place])


def test_what_probes_compare_is_on_the_page_that_compares(client):
    with client.application.app_context():
        sections = leads_to("/compare", {})[3].sections
    assert list(sections) == ["Effective length at 1,024", "Position parameters", "Loss along the context"]
    titles = [[part.figure.layout.title.text for part in group] for group in sections.values()]
    assert titles[0][:2] == [
        "Effective length at 1,024 of each head, against base",
        "Effective length at 1,024 over all heads",
    ]
    assert titles[2] == ["Loss by position in the context", "Loss against base, by position"]


def test_a_training_is_on_the_page_of_checkpoints(tmp_path: Path):
    rows = {"adapter": "x", "step": [0, 1], "context_length": 64, "tokens": 48}
    with RunWriter.open(tmp_path, "adapt", {}) as writer:
        training = pd.DataFrame({**rows, "loss": [3.0, 2.9], "rate": 1.0})
        validation = pd.DataFrame({**rows, "doc": "d", "position": 63, "nll": [3.0, 2.9]})
        writer.add("all", {"training": training, "validation": validation})
        writer.commit(["all"], manifest(("base",)))
    with create(tmp_path).server.app_context():
        sections = leads_to("/checkpoints", {})[3].sections
    assert {heading: len(group) for heading, group in sections.items()} == {"Training": 3}


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
    synthetic_run(tmp_path, models=("yarn", "yarn without factor"), docs=2)
    with create(tmp_path).server.app_context():
        _, _, _, content = leads_to("/influence", {"model": "yarn"})
    (told,) = content.sections[""]
    assert told.sentences
    assert not any(sentence.startswith("yarn without") for sentence in told.sentences)


def test_a_run_without_models_is_shown_by_its_probes_page(tmp_path: Path):
    with RunWriter.open(tmp_path, "scaling", {}) as writer:
        same = {"scheme": "nope", "regime": "i", "exponent": 0.9, "beta": 2.0, "context_length": 100, "seed": 0}
        writer.add(
            "all", {"scaling": pd.DataFrame([{**same, "scale": 1.0, "target": 63.0, "ess": 70.0, "ratio": 1.1}])}
        )
        writer.commit(["all"], manifest(()))
    with create(tmp_path).server.app_context():
        page, run, view, content = leads_to("/scaling", {})
        assert content.title == "Scaling theorems"
        assert [type(part) for part in parts(content)] == [Words, Chart]
        assert [part.id["control"] for part in walk(controls(page, run, view)) if controlled(part)] == ["run"]
        overview = leads_to("/", {})[3]
        assert overview.title == "Probes"
        assert list(overview.sections) == ["What was found", "Runs in this folder", "How it was made"]
        for path in PATHS:
            assert saving.saved(leads_to(path, {})[3], run, view).count("<h1>") == 1


# Probes that the app does not know


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install probes for this test, behind ours."""
    ours = dict(door.probes())

    def add(*probes: door.Probe) -> None:
        monkeypatch.setattr(door, "probes", lambda: ours | {probe.name: probe for probe in probes})

    return add


@pytest.fixture
def fresh(folder: Path, run: Run) -> Iterator[None]:
    """An app on runs that nobody has read yet."""
    (run.path / "run.json").touch()
    with create(folder).server.app_context():
        yield


def test_a_foreign_probe_gets_a_page_and_its_place_on_others(install: Callable[..., None], fresh: None):
    install(PROBE)
    page, _, view, content = leads_to("/foreign", {"model": "yarn"})
    assert ([page.NAME for page in pages()][-2], page.CONTROLS) == ("Foreign", ("model", "layers", "role"))
    assert (content.title, content.lead) == ("Foreign matters", "What is foreign here.")
    assert list(content.sections) == ["", "At home", "Abroad"]
    assert [(words.heading, *words.sentences) for words in content.sections[""]] == [
        ("", "There are 3 models."),
        ("Loss", "Foreign losses are like ours."),
    ]
    (chart,) = content.sections["At home"]
    assert chart.figure.layout.title.text == "At home with yarn"
    assert sum(isinstance(part, dcc.Graph) for part in walk(body(page, content, view))) == 2
    compared = leads_to("/compare", {})[3].sections
    assert [part.figure.layout.title.text for part in compared["Abroad"]] == ["Abroad"]
    assert "At home" not in compared
    head = leads_to("/head/1.2", {"model": "yarn"})[3].sections
    assert head["What it does"][-1].figure.layout.title.text == "Foreign chart of 1.2 in yarn"
    assert head[""][-1].sentences[-1] == "Foreign to yarn: 1.2."
    assert leads_to("/", {})[3].sections["What was found"][-1].heading == "Foreign matters"


def test_a_probe_may_draw_its_own_page_or_have_none(install: Callable[..., None], fresh: None):
    install(replace(PROBE, page="foreign_probe:page"))
    content = leads_to("/foreign", {"model": "yarn"})[3]
    assert (content.title, content.lead, [*content.sections]) == ("My own page", "yarn", [""])
    install(replace(PROBE, tab=None))
    with pytest.raises(BadInput, match="no page"):
        leads_to("/foreign", {})


def test_a_broken_probe_breaks_its_own_page_alone(install: Callable[..., None], fresh: None, run: Run):
    def drawn(path: str) -> list[str]:
        return [part.figure.layout.title.text for part in parts(leads_to(path, {})[3]) if isinstance(part, Chart)]

    before = {path: drawn(path) for path in PATHS}
    (run.path / "run.json").touch()  # so that it is read anew
    install(BROKEN, LATE, replace(PROBE, name="torn", tab="Torn", page="foreign_probe:failing"))
    with pytest.raises(BrokenProbe, match="'broken': its charts"):
        leads_to("/broken-matters", {})
    assert list(leads_to("/foreign", {})[3].sections) == ["", "At home"]
    for path in PATHS:
        assert set(before[path]) <= set(drawn(path))
