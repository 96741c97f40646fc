"""Named sets of heads: selected in the app, exported as a study, run, and compared with an ablation by transformers."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from playwright.sync_api import Browser
from support import families
from support.refusals import refuses
from support.synthetic_runs import synthetic_run
from werkzeug.serving import make_server

import headscope as hs
from dashboards.app import create_app
from headscope.base.heads import parse_head
from headscope.errors import BadInput, BadOption
from headscope.positions.model import Model
from headscope.prompts.texts import TokenDocument
from headscope.rendering import assembly
from headscope.results.collection import all_results
from headscope.runs.run import Run
from headscope.runs.run_tables import validate
from headscope.study import context as materials
from headscope.study import runner
from headscope.study.config import build_study
from probes.influence import results
from probes.influence import view as charts
from probes.influence.run import head_influence

LENGTH, DOCS = 40, 3
SETS = {"selected": ["L1H2", "L3H0"], "early: 'ones'": ["L0H1", "L0H3", "L2H2"]}


def ids(number: int) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(3, families.VOCAB, (LENGTH,), generator=generator).tolist()


@pytest.fixture(autouse=True, scope="module")
def texts() -> Iterator[None]:
    """Random tokens for a model that has no tokenizer."""

    def random_documents(source: str, tokenizer: Any, docs: int, length: int, seed: int = 0) -> list[TokenDocument]:
        return [TokenDocument(f"random/{n}", ids(n)) for n in range(docs)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(materials, "load_token_documents", random_documents)
        patch.setattr(materials.StudyContext, "tokenizer", lambda self, label: None)
        yield


@pytest.fixture(scope="module")
def model() -> Model:
    return hs.load(families.MEASURABLE["llama-gqa"]())


@pytest.fixture(scope="module")
def exported(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The study file that the app exports for these sets."""
    folder = tmp_path_factory.mktemp("runs")
    synthetic_run(folder, models=("base",), layers=4, heads=4, groups=2, pairs=2, lengths=(256,), docs=2)
    server = make_server("127.0.0.1", 0, create_app(folder).server, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page = chromium.new_page(accept_downloads=True)
    page.goto(f"http://127.0.0.1:{server.server_port}/heads?heads=1.2_3.0&sets=early:%20'ones':0.1_0.3_2.2")
    with page.expect_download() as download:
        page.get_by_role("button", name="YAML").click(timeout=60_000)
    text = Path(download.value.path()).read_text(encoding="utf-8")
    page.close()
    server.shutdown()
    return text


def run_of(content: dict[str, Any], model: Model, out: Path, **section: Any) -> Run:
    """The study of these sets, the output of each unit taken away."""
    influence = {"lengths": [LENGTH], "components": ["zero"], **content["influence"], **section}
    study = build_study({"models": {"tiny": "tiny"}, "texts": {"docs": DOCS}, "influence": influence})
    return runner.run_study(study, out, in_memory_models={"tiny": model})


def ablated(model: Model, document: int, heads: list[str]) -> float:
    """Loss added by these heads together, by transformers' own forward pass: zeros where o_proj reads them."""
    net, tokens = model.module, torch.tensor([ids(document)])
    width = net.config.head_dim

    def loss() -> float:
        with torch.no_grad():
            return float(net(tokens, labels=tokens).loss)

    def hide(head: int) -> Any:
        def hook(_: Any, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            edited = arguments[0].clone()
            edited[..., head * width : (head + 1) * width] = 0
            return (edited,)

        return hook

    before = loss()
    hooks = []
    for layer, head in map(parse_head, heads):
        hooks.append(net.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(hide(head)))
    after = loss()
    for hook in hooks:
        hook.remove()
    return after - before


@pytest.mark.browser
def test_an_exported_selection_is_a_study_whose_sets_are_ablated_together(
    exported: str, model: Model, tmp_path: Path
) -> None:
    content = yaml.safe_load(exported)
    assert content == {"influence": {"heads": SETS}}
    run = run_of(content, model, tmp_path, method="exact")
    assert validate(run) == []
    rows = run.table("influence_sets").astype({"choice": "str", "doc": "str", "unit": "str"})
    assert set(rows["choice"]) == {f"set:{name}" for name in SETS}
    assert set(rows["unit"]) == {"head"}
    for row in rows.to_dict("records"):
        heads = SETS[row["choice"].removeprefix("set:")]
        assert row["size"] == len(heads)
        document = int(row["doc"].removeprefix("random/"))
        assert row["delta_nll"] == pytest.approx(ablated(model, document, heads), abs=2e-5)
    alone = run.influence.astype({"doc": "str"}).set_index(["doc", "layer", "head"])["delta_nll"]
    every = {parse_head(head) for heads in SETS.values() for head in heads}
    assert {unit[1:] for unit in alone.index} == every, "exact evaluates these heads and no other"
    for (doc, layer, head), delta in alone.items():
        document = int(doc.removeprefix("random/"))
        assert delta == pytest.approx(ablated(model, document, [f"L{layer}H{head}"]), abs=2e-5)
    named = [result.where["choice"] for result in all_results(run) if result.question == "influence.named_set"]
    assert sorted(named) == sorted(SETS)
    sweep_charts = [chart for group in charts.charts(assembly.render_context(run)) for chart in group.charts]
    (bars,) = [chart.figure for chart in sweep_charts if str(chart.figure.layout.title.text).startswith("Named sets")]
    means = rows.groupby("choice")["delta_nll"].mean()
    np.testing.assert_allclose(sorted(bars.data[0].y), sorted(means), atol=1e-9)


def test_verify_evaluates_named_and_top_heads_and_estimates_every_head(model: Model, tmp_path: Path) -> None:
    run = run_of({"influence": {"heads": SETS}}, model, tmp_path, method="verify", verify_top=2, verify_random=1)
    rows = run.influence.astype({"method": "str", "doc": "str"})
    evaluated = rows[rows["method"] == "exact"]
    named_heads = {parse_head(head) for heads in SETS.values() for head in heads}
    assert named_heads <= set(evaluated[["layer", "head"]].itertuples(index=False, name=None))
    assert len(rows[rows["method"] == "estimate"]) == 16 * DOCS
    assert set(run.table("influence_sets")["choice"].astype("str")) == {f"set:{name}" for name in SETS}


def test_head_influence_function_accepts_named_heads(model: Model) -> None:
    effects = head_influence(model, docs=1, length=LENGTH, method="exact", components=["zero"], heads={"one": ["1.2"]})
    assert effects[["layer", "head"]].to_numpy().tolist() == [[1, 2]]
    assert float(effects["delta_nll"].iloc[0]) == pytest.approx(ablated(model, 0, ["L1H2"]), abs=2e-5)


def test_flag_and_study_file_give_the_same_run() -> None:
    flag = build_study({"influence": {"heads": "picked=L1H2,3.0;early=l0h1, L0H1"}})
    assert flag.probe_options["influence"].heads == {"picked": ["L1H2", "L3H0"], "early": ["L0H1"]}


@pytest.mark.parametrize(
    ("heads", "named"),
    [
        ({"a": ["L1G2"]}, ("'a'", "'L1G2'")),
        ({"a": ["1.g0"]}, ("'a'", "'1.g0'", "L1H0")),
        ({"a": []}, ("'a'", "induction=L5H1,L6H3")),
        ("L1H2", ("'L1H2'", "induction=L5H1,L6H3")),
        ({}, (1,)),
        ("a=L1H1;a=L2H2", ("'a'", "twice")),
        ("=L0H1", ("L0H1", "no name", "induction=L5H1,L6H3")),
    ],
)
def test_unknown_head_set_is_refused_by_name(heads: Any, named: tuple[object, ...]) -> None:
    with refuses(BadOption, "influence.heads", *named):
        build_study({"influence": {"heads": heads}})


@pytest.mark.parametrize(("head", "advised"), [("L4H0", ("layers 0 to 3",)), ("L0H4", ("heads 0 to 3", "layer 0"))])
def test_a_head_that_the_model_lacks_is_refused(
    model: Model, tmp_path: Path, head: str, advised: tuple[str, ...]
) -> None:
    with refuses(BadInput, "'tiny'", head, "'a'", *advised):
        run_of({"influence": {"heads": {"a": [head]}}}, model, tmp_path, method="exact")


def test_small_parts_use_only_documents_in_which_every_unit_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    values = pd.DataFrame([[1.0, 2.0, 1.5, 9.0], [0.5, 0.4, 0.6, np.nan]], columns=["a", "b", "c", "d"])
    together = pd.DataFrame([[10.0, 12.0, 11.0, 90.0]], columns=[*values], index=["all"])
    units = pd.DataFrame({"layer": [0, 0], "kv_group": [0, 1], "head": [-1, -1]})
    effects: Any = SimpleNamespace(values=values, units=units, is_exact=pd.Series([True, True]), model="m", where={})
    monkeypatch.setattr(results, "sweep_details", lambda effects: {})
    sets: Any = SimpleNamespace(values=together, unit_key=lambda unit: "all")
    claim = results._small_parts(effects, sets, pd.Series(dtype=float))
    complete = (together.loc["all"] / 4 - values.iloc[0])[["a", "b", "c"]]
    assert claim.n == 3
    assert claim.value == pytest.approx(complete.mean())
    assert (claim.details["largest"], claim.details["all_units"]) == pytest.approx((1.5, 11.0))
