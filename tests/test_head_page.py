"""The page of a head: its roles, its attention map, and the heads like it."""

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import pandas as pd
import pytest
from support.refusals import assert_names
from support.synthetic_runs import synthetic_run

from dashboards.app import create_app
from dashboards.layout import resolve_url
from dashboards.lazy_loading import RenderedPage
from headscope.cli.flags import EXAMPLES
from headscope.rendering import assembly, similar_heads
from headscope.rendering.blocks import Chart, PageContent, TextBlock, TextTable
from headscope.rendering.explorer_blocks import Badges, KeyLinks, LinkChoice, Passage
from headscope.runs.column_metadata import heads_with_role, roles
from headscope.runs.head_profiles import (
    NO_ROLE,
    head_profiles,
    head_roles,
    principal_components,
    profile_distances,
    strongest_roles,
)
from headscope.runs.run import Run, combine_runs
from headscope.runs.summary import default_models_with
from probes.measure.analysis import LOCAL_LENGTH
from probes.needle.trial_explorer import trial_blocks
from probes.patterns import similarity
from probes.patterns import view as maps
from probes.patterns.results import stored_queries, top_keys

LAYER, HEAD = 1, 2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("runs"), models=("base", "yarn"), lengths=(256, 300), docs=2, pairs=2)


def head_page(run: Run, **query: str) -> PageContent:
    with create_app(run.path.parent).server.app_context():
        return resolve_url(f"/head/{LAYER}.{HEAD}", query)[3]


# The card -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_page_starts_with_roles_map_effective_length_and_three_rows_and_folds_its_tables(run: Run) -> None:
    content = head_page(run, model="yarn")
    badges, _ = content.sections[""]
    attention_map, length, rows, *behaviour = content.sections["Behaviour"]
    assert isinstance(badges, Badges)
    assert [type(block) for block in (attention_map, length, rows)] == [Chart, Chart, Passage]
    assert str(attention_map.figure.layout.title.text).startswith("Attention map")
    assert (attention_map.half_width, length.half_width, rows.half_width) == (False, True, True)
    assert len(rows.rows) == 3
    sections = [blocks for heading, blocks in content.sections.items() if heading not in ("", "Behaviour")]
    others = [*behaviour, *(block for blocks in sections for block in blocks)]
    tables = [block for block in others if isinstance(block, TextTable) and "distance" not in block.column_names[-1]]
    assert tables
    assert all(table.collapsed for table in tables)


@pytest.mark.slow
def test_the_first_sentence_names_the_role_in_which_the_head_ranks_highest(run: Run) -> None:
    for row in run.heads[run.heads["model"] == "yarn"].itertuples():
        held_roles = head_roles(run, "yarn", row.layer, row.head)
        sentence = assembly.head_roles_sentence(run, "yarn", row.layer, row.head)
        if not held_roles:
            assert_names(sentence, "yarn")
            assert not [name for name in roles() if name in sentence]
            continue
        assert_names(sentence.partition("(")[0], "yarn", held_roles[0].name)
        assert [role.rank for role in held_roles] == sorted(role.rank for role in held_roles)
        heads = run.heads[run.heads["model"] == "yarn"]
        is_head = (heads["layer"] == row.layer) & (heads["head"] == row.head)
        has = {name for name, role in roles().items() if role.order_by and heads_with_role(heads[is_head], name).any()}
        assert {role.name for role in held_roles} == has
    strongest = strongest_roles(run)
    for index, row in run.heads.iterrows():
        held_roles = head_roles(run, row["model"], row["layer"], row["head"])
        assert strongest[index] == (held_roles[0].name if held_roles else NO_ROLE)


def test_a_local_head_is_shown_with_the_effective_length_that_makes_it_local(run: Run) -> None:
    held = [
        role
        for row in run.heads[run.heads["model"] == "yarn"].itertuples()
        for role in head_roles(run, "yarn", row.layer, row.head)
        if role.name == "local"
    ]
    assert held
    for role in held:
        assert role.statistic_name.startswith("ess2_")
        assert role.value < LOCAL_LENGTH
        assert role.rank_text.endswith("heads by local mass")


@pytest.mark.slow
def test_badges_lead_to_the_heads_of_the_role_in_the_state_of_the_page(run: Run) -> None:
    with create_app(run.path.parent).server.app_context():
        page, _, view, content = resolve_url(f"/head/{LAYER}.{HEAD}", {"model": "yarn"})
        header = RenderedPage("", page, run, view, content).initial_components()
    links = [item for item in str(header).split("'") if item.startswith("/heads?") and "role=" in item]
    assert links
    assert all("model=yarn" in link and f"run={run.name}" in link for link in links)


def test_the_neighbours_of_a_head_keep_the_tab_and_the_trial(run: Run) -> None:
    _, neighbours = head_page(run, tab="at-the-needle-s-answer", trial="2", step="3").sections[""]
    assert isinstance(neighbours, KeyLinks)
    assert {link.href.split("?")[1] for link in neighbours.links} == {"tab=at-the-needle-s-answer&trial=2&step=3"}


def test_another_trial_starts_at_the_answer_token_that_is_shown_by_default() -> None:
    run = next(run for run in map(Run.open, EXAMPLES.glob("*-needle-*")) if "needle_keys" in run.tables)

    def choices(query: Mapping[str, str]) -> tuple[LinkChoice, LinkChoice]:
        blocks = trial_blocks(run, run.models[0], 18, 6, query)
        trials, steps = (block for block in blocks if isinstance(block, LinkChoice))
        return trials, steps

    copied = False
    for number, link in enumerate(choices({"step": "2"})[0].links[:4]):
        copied |= "copies" in link.text
        trials, steps = choices(dict(parse_qsl(link.href.removeprefix("?"))))
        default = choices({"trial": str(number + 1)})[1]
        assert (trials.selected_index, steps.selected_index) == (number, default.selected_index)
    assert copied


@pytest.mark.slow
def test_only_runs_that_have_the_head_are_offered_for_what_this_run_lacks(tmp_path: Path) -> None:
    sizes = {"models": ("base",), "heads": 4, "groups": 2, "pairs": 2, "lengths": (256,), "docs": 2}
    smaller, larger = (synthetic_run(tmp_path, layers=layers, **sizes) for layers in (1, 2))
    bare = synthetic_run(tmp_path, layers=2, probes=("measure",), **sizes)
    assert "needle_keys" not in bare.tables
    with create_app(bare.path).server.app_context():
        (offer,) = resolve_url(f"/head/{LAYER}.{HEAD}", {})[3].sections["At the needle's answer"]
    assert isinstance(offer, TextBlock)
    assert offer.links is not None
    shown = [dict(parse_qsl(urlsplit(link.href).query))["run"] for link in offer.links.links]
    assert shown == [larger.name] != [smaller.name]


# The map ------------------------------------------------------------------------------------------------------------


def test_the_map_shows_two_models_and_their_difference_over_the_same_blocks(run: Run) -> None:
    chart = maps.head_map_chart(run, "yarn", LAYER, HEAD)
    assert chart is not None
    base, yarn, change = (trace for trace in chart.figure.data if trace.type == "heatmap")
    assert (base.meta, yarn.meta, change.meta) == ("base", "yarn", "yarn")
    stored = maps.head_map(run, "yarn", LAYER, HEAD)
    assert stored is not None
    assert stored.weights.shape == (100, 100), "300 tokens in blocks of 3"
    lower = np.tril_indices(100)
    np.testing.assert_allclose(yarn.z[lower], stored.weights[lower], rtol=1e-6)
    assert np.isnan(yarn.z[np.triu_indices(100, 1)]).all()
    np.testing.assert_allclose(change.z[lower], yarn.z[lower] - base.z[lower], atol=6e-5)
    assert stored.first_tokens[:3].tolist() == [0, 3, 6]
    assert stored.last_tokens[-1] == 299
    texts = chart.figure.layout.xaxis.ticktext
    assert texts[1].startswith("3–5 “")
    assert not any("<b>" in text for text in texts)


def test_a_block_of_the_map_leads_to_the_stored_row_nearest_to_it(run: Run) -> None:
    chart = maps.head_map_chart(run, "base", LAYER, HEAD)
    assert chart is not None
    queries = stored_queries(run, ("base", 300, "synthetic/0", LAYER, HEAD))
    for block, (link,) in enumerate(chart.cell_links):
        row = int(link.split("row=")[1])
        assert abs(row - (3 * block + 1)) == min(abs(query - (3 * block + 1)) for query in queries)
        assert link.startswith(f"/lens?doc=synthetic%2F0&length=300&layer={LAYER}&head={HEAD}&row=")


@pytest.mark.slow
def test_a_model_that_charts_leave_out_by_default_has_all_charts(tmp_path: Path, caplog) -> None:
    """With more models than the charts show, and a longer context in a model that they leave out."""
    sizes = {"layers": 2, "heads": 3, "groups": 1, "pairs": 2, "docs": 2}
    runs = [
        synthetic_run(tmp_path, [f"m{number}"], lengths=(64, 512 if number == 4 else 128), **sizes)
        for number in range(9)
    ]
    combined = combine_runs(runs)
    shown = default_models_with(combined, "m1")
    assert "m4" not in shown
    charts = [block for block in assembly.head_blocks(combined, "m1", 1, 2) if isinstance(block, Chart)]
    by_title = {str(chart.figure.layout.title.text): chart.figure for chart in charts}
    for title in ("Detector scores of layer 1, head 2", "Direct logit attribution of layer 1, head 2"):
        assert {*shown} <= {trace.name for trace in by_title[title].data}, title
    assert not [record for record in caplog.records if "fails" in record.message]


def test_a_run_without_maps_has_a_card_without_one(tmp_path: Path) -> None:
    bare = synthetic_run(tmp_path, layers=2, heads=4, pairs=2, lengths=(256,), docs=2, probes=["measure"])
    assert maps.head_map_chart(bare, "base", 0, 0) is None
    (chart,) = assembly.head_card(bare, "base", 0, 0)
    assert isinstance(chart, Chart)
    assert chart.figure.layout.title.text == "Effective length against context length"


# Heads like this one ------------------------------------------------------------------------------------------------


def test_the_distance_by_rows_is_the_total_variation_of_the_stored_rows_with_one_class_for_the_rest(run: Run) -> None:
    distances = similarity.row_distances(run, "yarn", LAYER, HEAD)
    for model, layer, head in (("base", 3, 1), ("yarn", 0, 0), ("base", LAYER, HEAD)):
        by_doc = []
        for doc in ("synthetic/0", "synthetic/1"):
            of_rows = []
            for query in stored_queries(run, ("yarn", 300, doc, LAYER, HEAD)):
                p, q = (
                    top_keys(run, (label, 300, doc, *unit), query).set_index("key")["weight"].astype(float)
                    for label, unit in (("yarn", (LAYER, HEAD)), (model, (layer, head)))
                )
                p[-1], q[-1] = 1 - p.sum(), 1 - q.sum()
                of_rows.append(p.sub(q, fill_value=0).abs().sum() / 2)
            by_doc.append(np.mean(of_rows))
        assert distances.loc[(model, layer, head), "distance"] == pytest.approx(np.mean(by_doc), abs=1e-7)
        assert distances.loc[(model, layer, head), "spread"] == pytest.approx(max(by_doc) - min(by_doc), abs=1e-7)
    assert ("yarn", LAYER, HEAD) not in distances.index
    assert distances["distance"].between(0, 1).all()
    assert len(distances) == 47


def test_profiles_are_standardised_and_their_distance_is_a_root_mean_square(run: Run) -> None:
    profiles = head_profiles(run)
    np.testing.assert_allclose(profiles.mean(), 0, atol=1e-9)
    np.testing.assert_allclose(profiles.std(ddof=0), 1)
    assert "ess2_300" in profiles
    assert "ess2_256" not in profiles
    distances = profile_distances(run, "base", LAYER, HEAD)
    assert distances.is_monotonic_increasing
    assert ("base", LAYER, HEAD) not in distances.index
    difference = profiles.loc[("yarn", 0, 3)] - profiles.loc[("base", LAYER, HEAD)]
    assert distances[("yarn", 0, 3)] == pytest.approx(np.sqrt((difference**2).mean()))


def test_components_explain_the_largest_variance_with_a_fixed_sign(run: Run) -> None:
    components = principal_components(run)
    assert components is not None
    values = head_profiles(run)[components.loadings.index].fillna(0).to_numpy()
    shares = np.linalg.eigvalsh(values.T @ values)[::-1][:2] / (values**2).sum()
    np.testing.assert_allclose(components.shares, shares, rtol=1e-6)
    np.testing.assert_allclose(components.coordinates.to_numpy(), values @ components.loadings.to_numpy(), atol=1e-9)
    for axis in components.loadings:
        assert components.loadings[axis].iloc[int(components.loadings[axis].abs().argmax())] > 0


def test_similar_heads_are_listed_per_model_with_links_and_drawn_by_role(run: Run) -> None:
    blocks = [*head_page(run, model="yarn").sections["Heads like this one"]]
    by_rows, by_profile, plane = blocks
    for table in (by_rows, by_profile):
        assert isinstance(table, TextTable)
        assert [row[0] for row in table.rows] == ["yarn", "base"]
    assert "≈" in by_rows.caption
    nearest = similarity.row_distances(run, "yarn", LAYER, HEAD)["distance"].loc["base"].index[0]
    assert by_rows.rows[1][1].links[0].href == f"/head/{nearest[0]}.{nearest[1]}?model=base"
    assert isinstance(plane, Chart)
    points = [trace for trace in plane.figure.data if trace.customdata is not None]
    assert sum(len(trace.x) for trace in points) == 24
    heads = run.heads[run.heads["model"] == "yarn"]
    expected = strongest_roles(run)[heads.index].value_counts().to_dict()
    assert {trace.name: len(trace.x) for trace in points} == expected


def test_a_change_of_the_chart_of_components_stays_on_its_page(run: Run) -> None:
    first, second = (next(similar_heads.components_chart(run, "yarn")) for _ in range(2))
    assert isinstance(first, Chart)
    assert isinstance(second, Chart)
    first.figure.update_traces(selectedpoints=[0])
    assert all(trace.selectedpoints is None for trace in second.figure.data)


def test_heads_without_statistics_have_no_components(run: Run) -> None:
    class Bare:
        heads = pd.DataFrame({"model": ["a"], "layer": [0], "head": [0]})

        def derived(self, compute: object) -> object:
            return compute(self)  # type: ignore[operator]

    assert [*similar_heads.components_chart(Bare(), "a")] == []  # type: ignore[arg-type]
