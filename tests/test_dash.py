"""The app without a browser: what a URL means, what it may reach, and how the modules are made."""

import ast
from pathlib import Path

import pytest

from dashboards import saving
from dashboards.app import create
from dashboards.content import Grid
from dashboards.frame import PAGES, body, leads_to
from dashboards.view import FILTERS, View, place_of, statistics
from headscope.errors import BadInput
from headscope.store import Run
from headscope.synthetic import synthetic_run

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "dashboards").rglob("*.py"))


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
    with pytest.raises(BadInput):
        place_of(at, run)


def test_only_statistics_with_a_number_can_be_chosen(run: Run):
    offered = statistics(run.heads)
    assert offered[:2] == ["ess2_1024", "ess2_256"]
    assert all(run.heads[name].notna().any() for name in offered)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.NAME)
def test_every_page_can_be_saved_as_one_file(client, folder: Path, page):
    with client.application.app_context():
        _, run, view, content = leads_to(page.PATH, {})
    html = saving.saved(content, run, view)
    assert html.count("<h1>") == 1
    assert "http://" not in html.split("<script")[0].replace("http://www.w3.org", "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.NAME)
@pytest.mark.parametrize("kept", ["some", "none"])
def test_every_page_survives_filters(client, page, kept: str):
    query = {"model": "yarn", "base": "base", "stat": "growth", "layers": "1-2", "role": "local", "pick": "1.2_0.3"}
    if kept == "none":
        query["low"] = "99"
    with client.application.app_context():
        _, _, view, content = leads_to(page.PATH, query)
        assert body(page, content, view)


def test_the_grid_compares_with_the_pinned_baseline(client):
    with client.application.app_context():
        _, run, _, content = leads_to("/heads", {"model": ["yarn"], "base": ["base"], "stat": ["ess2_1024"]})
    (grid,) = [part for part in content.sections[""] if isinstance(part, Grid)]
    wide = run.heads.set_index(["model", "layer", "head"])["ess2_1024"]
    for _, row in grid.heads.iterrows():
        place = (row["layer"], row["head"])
        assert row["change"] == pytest.approx(wide["yarn", *place] / wide["base", *place])


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
    assert "import" not in text.split("<body>")[0]


def test_the_app_draws_nothing_itself_and_its_callbacks_are_short():
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
                assert node.end_lineno - node.lineno < 20, f"{file.name}: {node.name}"


def test_the_findings_of_a_model_are_not_those_of_one_whose_name_begins_alike(tmp_path: Path):
    synthetic_run(tmp_path, models=("yarn", "yarn without factor"), docs=2)
    with create(tmp_path).server.app_context():
        _, _, _, content = leads_to("/influence", {"model": "yarn"})
    (told,) = content.sections[""]
    assert told.sentences
    assert not any(sentence.startswith("yarn without") for sentence in told.sentences)
