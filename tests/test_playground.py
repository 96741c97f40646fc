"""The playground: what its tasks compute, the worker process, who may reach it, and the page in a browser."""

import json
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from dash._utils import to_json
from flask import Flask
from playwright.sync_api import Browser, Page, Request, Route, expect
from support import families
from support.adapters import noisy
from support.playground_page import CONTINUATION, waiting_for_results
from support.refusals import assert_names, refuses
from support.synthetic_runs import synthetic_run
from support.tiny_studies import save_checkpoint
from torch import Tensor
from werkzeug.serving import make_server

import headscope
from dashboards.app import create_app
from dashboards.components import build_component
from dashboards.layout import resolve_url
from dashboards.playground.callbacks import parse_count, parse_request, second_prompt, store_prompt_as_run
from dashboards.playground.components import next_token_table
from dashboards.playground.view import parse_view
from dashboards.playground.worker import ModelWorker, authorized_worker, page_token
from headscope.errors import BadInput, CannotWrite, Interrupted
from headscope.interventions.heads import head_units
from headscope.interventions.metrics import PairTokens
from headscope.interventions.pair_runs import PairRuns
from headscope.playground import tasks
from headscope.playground.model_session import ModelSession
from headscope.playground.prompt_predictions import PromptPrediction
from headscope.positions.model import Model
from headscope.rendering import assembly
from headscope.runs.run import Run

PROMPT = "w5 w6 w7 w5 w6 w9 w5 w5 w6"
OWN = {"Origin": "http://127.0.0.1:8050"}
HEADS = [(0, 1), (1, 2)]


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> Iterator[None]:
    """Start workers from a process that has imported torch, so that not every one of them imports it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["headscope.playground.tasks", "transformers.models.llama.modeling_llama"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dashboards.playground.worker.multiprocessing.get_context", lambda method: context)
        yield


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = save_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
    for name in ("config.json", "generation_config.json"):  # generation must not end by itself
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {"eos_token_id": None}))
    return {"base": str(folder), "yarn": f"{folder}@yarn:factor=4"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    synthetic_run(folder, models=("base",), layers=2, heads=4, groups=2, pairs=2, lengths=(256,), docs=2)
    return folder


@pytest.fixture(scope="module")
def session(specs: dict[str, str]) -> ModelSession:
    return ModelSession(specs)


@pytest.fixture(scope="module")
def worker(specs: dict[str, str]) -> Iterator[ModelWorker]:
    worker = ModelWorker(specs)
    yield worker
    worker.stop()


def next_probabilities(model: Model) -> Tensor:
    with headscope.attached(model), torch.no_grad():
        return model.module(tasks.prompt_ids(model, PROMPT)).logits[0, -1].double().softmax(-1)


def eager_attention(model: Model) -> list[Tensor]:
    """Attention weights [H, L, L] of every layer by transformers' own eager attention."""
    before = model.module.config._attn_implementation
    model.module.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model.module(tasks.prompt_ids(model, PROMPT), output_attentions=True).attentions
    model.module.set_attn_implementation(before)
    return [layer[0] for layer in weights]


def test_a_reading_has_the_losses_and_next_tokens_of_each_model(session: ModelSession) -> None:
    predictions = tasks.predict_prompt(session, PROMPT)
    assert [prediction.label for prediction in predictions] == ["base", "yarn"]
    for prediction in predictions:
        model = session.model(prediction.model)
        ids = tasks.prompt_ids(model, PROMPT)
        with headscope.attached(model), torch.no_grad():
            logits = model.module(ids).logits[0]
        expected = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="none")
        np.testing.assert_allclose(prediction.losses, expected, atol=1e-5)
        p = logits[-1].softmax(-1)
        assert len(prediction.next_tokens) == tasks.SHOWN_NEXT_TOKENS
        for name, probability in prediction.next_tokens.items():
            assert probability == pytest.approx(float(p[model.tokenizer.convert_tokens_to_ids(name)]), rel=1e-4)
        assert "".join(prediction.token_texts).split() == PROMPT.split()
    assert [*predictions[0].next_tokens] == [*predictions[1].next_tokens]


def test_a_token_that_a_tokenizer_lacks_has_no_probability_in_the_browser() -> None:
    prediction = PromptPrediction(
        "base", False, ["a"], [False], np.zeros(0, np.float32), {"x": 0.5, "y": None}, {"x": "x", "y": "y"}, {0: 2}
    )
    sent = PromptPrediction.from_json(json.loads(to_json(prediction.to_json())))
    assert sent.next_tokens == prediction.next_tokens
    assert str(next_token_table([sent])).count("not in its vocabulary") == 1


def test_digits_keep_their_place_among_the_next_tokens_in_the_browser() -> None:
    """A browser sorts the keys of an object that are whole numbers before all others."""
    next_tokens = {"9": 0.9, " the": 0.05, "0": 0.03, "3": 0.02}
    texts = {name: name for name in next_tokens}
    heads = {2: 4, 0: 4}
    prediction = PromptPrediction("base", False, ["a"], [False], np.zeros(0, np.float32), next_tokens, texts, heads)
    sent = PromptPrediction.from_json(as_in_a_browser(to_json(prediction.to_json())))
    assert [*sent.next_tokens.items()] == [*next_tokens.items()]
    assert [*sent.next_texts] == [*texts]
    assert [*sent.heads_by_layer.items()] == [*heads.items()]


def as_in_a_browser(text: str) -> Any:
    """The JSON values with the keys of objects in the order of JavaScript."""

    def ordered(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        numbers = sorted((pair for pair in pairs if pair[0].isdecimal()), key=lambda pair: int(pair[0]))
        return dict([*numbers, *(pair for pair in pairs if not pair[0].isdecimal())])

    return json.loads(text, object_pairs_hook=ordered)


@pytest.mark.parametrize("kind", ["zero", "mean", "streaming:1+2"])
def test_ablation_changes_the_next_tokens_as_hs_ablated_does(session: ModelSession, kind: str) -> None:
    predictions = tasks.predict_prompt(session, PROMPT, HEADS, kind)
    assert [prediction.label for prediction in predictions] == ["base", "base, ablated", "yarn", "yarn, ablated"]
    for before, after in (predictions[:2], predictions[2:]):
        model = session.model(after.model)
        with headscope.attached(model), headscope.ablated(model, HEADS, kind):
            p = next_probabilities(model)
        for name, probability in after.next_tokens.items():
            assert probability == pytest.approx(float(p[model.tokenizer.convert_tokens_to_ids(name)]), rel=1e-4)
        assert after.next_tokens != before.next_tokens
    (again, _), model = tasks.predict_prompt(session, PROMPT), session.model("base")
    assert max(again.next_tokens.values()) == pytest.approx(float(next_probabilities(model).max()), rel=1e-4)


def test_a_picture_has_the_weights_of_eager_attention(session: ModelSession) -> None:
    for layer, expected in enumerate(eager_attention(session.model("base"))):
        weights = tasks.attention_of_layer(session, PROMPT, "base", layer)
        np.testing.assert_allclose(weights, expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["previous", "current", "first", "duplicate", "induction"])
def test_scores_of_a_prompt_are_mean_weights_on_their_kind_of_key(session: ModelSession, kind: str) -> None:
    model = session.model("base")
    ids = tasks.prompt_ids(model, PROMPT)[0].tolist()
    is_key: dict[str, Callable[[int, int], bool]] = {
        "previous": lambda i, j: j == i - 1,
        "current": lambda i, j: j == i,
        "first": lambda i, j: j == 0 < i,
        "duplicate": lambda i, j: j < i and ids[j] == ids[i],
        "induction": lambda i, j: 0 < j < i and ids[j - 1] == ids[i],
    }
    mask = torch.tensor([[is_key[kind](i, j) for j in range(len(ids))] for i in range(len(ids))])
    scores = tasks.prompt_scores(session, PROMPT, "base", kind).set_index(["layer", "head"])["value"]
    for layer, weights in enumerate(eager_attention(model)):
        expected = (weights * mask).sum(-1)[:, mask.any(-1)].mean(-1)
        np.testing.assert_allclose(scores[layer].to_numpy(), expected, atol=1e-5)


def test_attribution_is_the_change_of_the_logit_with_a_frozen_norm(session: ModelSession) -> None:
    """Reference: the derivative of the centred logit along each head's output, with the final norm's scale fixed."""
    model, token = session.model("base"), "w9"
    heads = tasks.head_attribution(session, PROMPT, "base", token).set_index(["layer", "head"])["value"]
    ids, module = tasks.prompt_ids(model, PROMPT), model.module
    outputs: list[Tensor] = []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: outputs.append(args[0][0, -1]))
        for layer in module.model.layers
    ]
    with torch.no_grad():
        stream = module.model(ids, output_hidden_states=True)
        before_norm = []
        handle = module.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0][0, -1]))
        outputs.clear()
        module.model(ids)
    for hook in (*hooks, handle):
        hook.remove()
    assert stream is not None
    scale = before_norm[0].pow(2).mean().add(module.config.rms_norm_eps).sqrt()
    unembedding = module.lm_head.weight
    target = unembedding[model.tokenizer.convert_tokens_to_ids(token)] - unembedding.mean(0)
    direction = module.model.norm.weight * target / scale
    for layer, z in enumerate(outputs):
        weight = module.model.layers[layer].self_attn.o_proj.weight
        for head, part in enumerate(z.view(model.geometry.heads, -1)):
            columns = slice(head * len(part), (head + 1) * len(part))
            assert heads[layer, head] == pytest.approx(
                float((direction @ (weight[:, columns] @ part)).detach()), abs=1e-5
            )


def test_the_continuation_is_that_of_greedy_generation(session: ModelSession) -> None:
    model = session.model("base")
    ids = tasks.prompt_ids(model, PROMPT)
    expected = model.module.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    continuations = tasks.continue_prompt(session, PROMPT, 6, HEADS, "zero")
    assert [entry[:2] for entry in continuations] == [("base", False), ("base", True), ("yarn", False), ("yarn", True)]
    assert continuations[0][2] == model.tokenizer.decode(expected)


def test_patching_estimates_are_shares_of_the_logit_difference(session: ModelSession) -> None:
    model, corrupted = session.model("base"), PROMPT.replace("w7", "w8")
    heads = tasks.patching_estimate(session, PROMPT, "base", corrupted, " w9", " w10").set_index(["layer", "head"])
    clean_ids, corrupted_ids = (tasks.prompt_ids(model, f"{text} w9") for text in (PROMPT, corrupted))
    answer, wrong = (torch.tensor([model.tokenizer.convert_tokens_to_ids(word)]) for word in ("w9", "w10"))
    pair = PairTokens(clean_ids, corrupted_ids, answer, wrong, clean_ids.shape[1] - 1)
    pair_runs = PairRuns(model, pair, "logit_diff", 2**20)
    with pair_runs.capturing():
        units = head_units(model.geometry)
        changes = pair_runs.estimate("denoising", [pair_runs.patch("z", "denoising", [unit]) for unit in units])
    difference = pair_runs.clean_value - pair_runs.corrupted_value
    for unit, change in zip(units, changes, strict=True):
        value = heads.loc[(unit.layer, unit.head), "value"]
        assert value == pytest.approx(change / difference, rel=1e-3, abs=1e-4)
    assert len(heads) == sum(model.geometry.layer_heads)
    with refuses(BadInput, "9 tokens", 1):
        tasks.patching_estimate(session, PROMPT, "base", "w8", " w9", " w10")


@pytest.fixture(scope="module")
def kept(session: ModelSession, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = str(tmp_path_factory.mktemp("kept"))
    token = next(iter(tasks.predict_prompt(session, PROMPT, HEADS, "mean")[0].next_tokens))
    name = tasks.keep_prompt(session, PROMPT, folder, token, HEADS, "mean")
    assert tasks.keep_prompt(session, PROMPT, folder, token, HEADS, "mean") == name, "nothing is measured twice"
    return Run.open(Path(folder) / name)


def test_a_kept_prompt_is_a_run_with_the_numbers_that_are_shown(kept: Run, session: ModelSession) -> None:
    predictions = tasks.predict_prompt(session, PROMPT, HEADS, "mean")
    token, losses = next(iter(predictions[0].next_tokens)), kept.nll.set_index("model")["nll"]
    changes = kept.ablation_sets.query("draw == 0").set_index("model")
    for before, after in (predictions[:2], predictions[2:]):
        assert losses[before.model] == pytest.approx(before.mean_loss, abs=1e-5)
        row = changes.loc[before.model]
        assert np.exp(row["metric_before"]) == pytest.approx(before.next_tokens[token], rel=1e-4)
        assert np.exp(row["metric_after"]) == pytest.approx(after.next_tokens[token], rel=1e-4)
        assert (row["kind"], row["size"]) == ("mean:text", len(HEADS))
    for layer in (0, 1):
        weights = tasks.attention_of_layer(session, PROMPT, "base", layer)
        for row in kept.top_keys.query("model == 'base' and layer == @layer").itertuples():
            assert row.weight == pytest.approx(weights[row.head, row.query, row.key], abs=1e-5)
    assert {"attention_maps", "token_text", "attribution", "detectors"} <= {*kept.tables}
    assert session.model("base").tokenizer.decode(kept.token_text["token"]) == PROMPT


def test_a_kept_run_opens_like_any_other(kept: Run) -> None:
    assert {"previous_token", "next_token_attribution"} <= {*assembly.run_statistics(kept)}
    server = create_app(kept.path.parent).server
    with server.app_context():
        (name,) = server.config["RUN_STORE"].list_runs()
        for path in ("/", "/lens", "/patterns", "/ablation", "/attribution"):
            assert resolve_url(path, {"run": name})[3].sections


@pytest.mark.slow
def test_a_read_only_app_keeps_nothing(runs: Path, specs: dict[str, str]) -> None:
    server = create_app(runs, specs, read_only=True).server
    with server.app_context(), refuses(CannotWrite, "--read-only"):
        store_prompt_as_run({}, "w9", server.config["PLAYGROUND_TOKEN"])
    with server.app_context():
        content = resolve_url("/playground", {})[3]
        (block,) = content.sections[""]
        assert build_component(block, None, "0")["playground-keep"].disabled


@pytest.mark.parametrize(
    ("prompt", "heads", "kind", "named"),
    [
        ("", "", "zero", ()),
        (" \n", "", "zero", ()),
        (PROMPT, "L1", "zero", ("'L1'", "L18H6")),
        (PROMPT, "L1H0", "zer", ("'zer'", "'zero'", "zero", "mean:text", "streaming:S+R")),
        (PROMPT, "L1H0", "streaming:4", ("'streaming:4'", "streaming:S+R")),
    ],
)
def test_bad_requests_are_refused_before_the_worker(prompt: str, heads: str, kind: str, named: tuple[str, ...]) -> None:
    with refuses(BadInput, *named):
        parse_request(prompt, heads, kind)


def test_bad_numbers_and_empty_second_prompts_are_refused() -> None:
    assert parse_request(PROMPT, "L1H0; 0.3 L1H0", "mean")["heads"] == [[1, 0], [0, 3]]
    for count in (-1, 201, 2.5, None, "x"):
        with refuses(BadInput, repr(count), 0, 200):
            parse_count(count)
    with refuses(BadInput, "wrong answer"):
        second_prompt("w1", "w2", " ")


def prompt_losses(session: ModelSession) -> list[float]:
    session.start_request("predict")
    first, *_ = tasks.predict_prompt(session, PROMPT)
    session.finish_request("predict")
    return [*map(float, first.losses)]


def save_other_weights(folder: Path) -> None:
    families.SPECS["llama-gqa"].build(1).save_pretrained(folder)


def save_other_adapter(folder: Path) -> None:
    noisy(headscope.load(str(folder)), 0.3).save(folder.parent / "adapter.safetensors")


@pytest.mark.parametrize("change", [save_other_weights, save_other_adapter])
def test_a_model_whose_files_change_is_opened_again(
    change: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Results of earlier and present weights are never on one page."""
    folder = save_checkpoint(tmp_path / "tiny")
    noisy(headscope.load(str(folder)), 0.1).save(tmp_path / "adapter.safetensors")
    spec = f"{folder}@adarope:adapter={tmp_path}/adapter.safetensors,weights=any"
    session = ModelSession({"trained": spec, "yarn": f"{folder}@yarn:factor=4"})
    before, models = prompt_losses(session), [session.model(label) for label in session.labels]
    session.cache["mean outputs", "trained"] = {}
    (folder / "trainer_state.json").write_text('{"global_step": 5}')  # the training's own files do not matter
    (folder / "optimizer.pt").write_bytes(b"state")
    assert prompt_losses(session) == before
    assert models == [session.model(label) for label in session.labels]
    change(folder)
    for _ in range(2):
        with refuses(BadInput, "'trained'"):
            session.start_request("attention")
    after = prompt_losses(session)
    assert after == prompt_losses(ModelSession({"trained": spec}))
    assert after != before
    session.start_request("attention")
    assert ("mean outputs", "trained") not in session.cache
    assert_names(caplog.text, "'trained'")


def test_files_that_change_while_no_model_is_open_are_noticed(tmp_path: Path) -> None:
    """Keeping a prompt closes the models; the page still shows the results of the earlier weights."""
    session = ModelSession({"base": str(save_checkpoint(tmp_path / "tiny"))})
    prompt_losses(session)
    session.close_models()
    save_other_weights(tmp_path / "tiny")
    with refuses(BadInput, "'base'"):
        session.start_request("attention")


@pytest.mark.slow
def test_the_worker_answers_one_request_at_a_time_in_order(worker: ModelWorker, session: ModelSession) -> None:
    expected = tasks.continue_prompt(session, PROMPT, 3)
    assert worker.run_task("continue", prompt=PROMPT, count=3) == expected
    with ThreadPoolExecutor(8) as pool:
        counts = [1, 3, 2, 3, 1, 2]
        answers = list(pool.map(lambda count: worker.run_task("continue", prompt=PROMPT, count=count), counts))
    for count, answer in zip(counts, answers, strict=True):
        assert len(answer[0][2].split()) == count


@pytest.mark.slow
def test_a_mistake_of_the_user_keeps_the_process(worker: ModelWorker) -> None:
    worker.run_task("predict", prompt=PROMPT)
    process = worker.process_id
    for arguments, named in (
        ({"prompt": "w1 " * 2049}, "2,048"),
        ({"prompt": PROMPT, "heads": [(7, 0)]}, "L7H0"),
        ({"prompt": " "}, "empty"),
    ):
        with refuses(BadInput, named):
            worker.run_task("predict", **arguments)
    with refuses(BadInput, 300, 256):
        worker.run_task("attention", prompt="w1 " * 300, model="base", layer=0)
    assert worker.process_id == process


@pytest.mark.slow
def test_a_dead_worker_is_reported_once_and_replaced(worker: ModelWorker) -> None:
    worker.run_task("predict", prompt=PROMPT)
    process = worker.process_id
    assert process is not None
    threading.Timer(0.5, os.kill, (process, signal.SIGKILL)).start()
    with refuses(BadInput, -signal.SIGKILL):
        worker.run_task("continue", prompt=PROMPT, count=10**6)
    assert len(worker.run_task("predict", prompt=PROMPT)) == 2
    assert worker.process_id != process


@pytest.mark.slow
def test_cancel_ends_the_running_and_the_waiting_requests(worker: ModelWorker) -> None:
    worker.run_task("predict", prompt=PROMPT)
    process = worker.process_id
    with ThreadPoolExecutor(2) as pool:
        requests = [pool.submit(worker.run_task, "continue", prompt=PROMPT, count=10**6) for _ in range(2)]
        time.sleep(0.5)
        worker.cancel()
        for request in requests:
            with refuses(Interrupted, "cancelled"):
                request.result(30)
    assert worker.process_id == process
    assert len(worker.run_task("predict", prompt=PROMPT)) == 2


@pytest.mark.slow
def test_cancel_ends_the_requests_of_its_own_page_only(worker: ModelWorker) -> None:
    worker.run_task("predict", prompt=PROMPT)
    own, other = (partial(worker.run_task, page=page) for page in ("own", "other"))
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(own, "continue", prompt=PROMPT, count=10**6)
        time.sleep(0.3)
        next_one = pool.submit(other, "continue", prompt=PROMPT, count=10**6)
        time.sleep(0.3)
        worker.cancel("own")
        with refuses(Interrupted, "cancelled"):
            running.result(30)
        waiting = pool.submit(own, "predict", prompt=PROMPT)
        time.sleep(0.3)
        worker.cancel("own")
        with refuses(Interrupted, "cancelled"):
            waiting.result(30)
        assert not next_one.done()
        worker.cancel("other")
        with refuses(Interrupted, "cancelled"):
            next_one.result(30)


def test_every_opened_page_has_a_token_of_its_own(app: Flask) -> None:
    with app.test_request_context(base_url=OWN["Origin"], headers=OWN):
        tokens = [page_token() for _ in range(2)]
        assert tokens[0] != tokens[1]
        assert authorized_worker(tokens[0]) is authorized_worker(tokens[1])


@pytest.mark.slow
def test_a_request_ends_at_the_time_limit(worker: ModelWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "time_limit", 0.5)
    with refuses(Interrupted, "0.5 s"):
        worker.run_task("continue", prompt=PROMPT, count=10**6)


@pytest.fixture(scope="module")
def app(runs: Path, specs: dict[str, str]) -> Iterator[Flask]:
    server = create_app(runs, specs).server
    yield server
    server.config["PLAYGROUND_WORKER"].stop()


def test_only_the_own_page_with_the_token_reaches_the_worker(app: Flask) -> None:
    token = app.config["PLAYGROUND_TOKEN"]
    for headers, sent in (({}, token), ({"Origin": "http://evil.example"}, token), (OWN, ""), (OWN, None), (OWN, "é")):
        with (
            app.test_request_context(base_url="http://127.0.0.1:8050", headers=headers),
            refuses(BadInput, "session"),
        ):
            authorized_worker(sent)
    with app.test_request_context(base_url=OWN["Origin"], headers=OWN):
        assert authorized_worker(token) is app.config["PLAYGROUND_WORKER"]
    assert app.config["PLAYGROUND_WORKER"].process_id is None, "the process starts on first use"


def test_without_a_model_the_page_names_the_command(runs: Path) -> None:
    app = create_app(runs)
    with app.server.app_context():
        page, run, _, content = resolve_url("/playground", {})
        command = page.missing_command(run)
    assert command.startswith("headscope dash --model ")
    (text,) = content.sections[""]
    assert text.command == command
    assert not [name for name in app.callback_map if "playground" in name]


def test_a_bad_model_is_refused_before_the_app_starts(request: pytest.FixtureRequest) -> None:
    code, _, err = request.getfixturevalue("headscope")("dash", "--model", "base=smollm2-135m@yran")
    assert code == 2
    assert_names(err, "'yran'", "'yarn'")


@pytest.fixture(scope="module")
def page(app: Flask, chromium: Browser) -> Iterator[Page]:
    server = make_server("127.0.0.1", 0, app, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    context = chromium.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(60_000)
    tab, problems = context.new_page(), list[str]()
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    tab.goto(f"http://127.0.0.1:{server.server_port}/playground")
    yield tab
    context.close()
    server.shutdown()
    assert problems == []


def run_prompt(page: Page, prompt: str, heads: str = "") -> None:
    page.locator("#playground-prompt").fill(prompt)
    page.locator("#playground-heads").fill(heads)
    page.locator("#playground-run").click()


def run_to_the_end(page: Page, prompt: str, heads: str = "") -> None:
    """Run a prompt and wait for its last result, so that no results of an earlier prompt are shown."""
    with waiting_for_results(page, prompt):
        run_prompt(page, prompt, heads)


@pytest.mark.browser
def test_a_typed_prompt_shows_its_tokens_the_pattern_and_the_effect_of_ablation(
    page: Page, session: ModelSession
) -> None:
    run_to_the_end(page, PROMPT, "L0H1, L1H2")
    expect(page.locator("#playground-next th", has_text="yarn, ablated")).to_be_visible()
    texts = page.locator("#playground-tokens .token").all_inner_texts()
    assert [text.strip() for text in texts] == PROMPT.split()
    for column, expected in enumerate(tasks.predict_prompt(session, PROMPT, HEADS)):
        cells = page.locator(f"#playground-next tbody td:nth-child({column + 2})")
        probabilities = [float(cell.get_attribute("title") or "nan") for cell in cells.all()]
        assert probabilities == pytest.approx([*expected.next_tokens.values()], abs=1e-6)
    page.locator("#attention-heads button").nth(2).click()
    expect(page.locator("#attention-title")).to_contain_text(re.compile("L[01]H2: base"))
    layer = int((page.locator("#attention-title").inner_text()).split("L")[1][0])
    page.locator("#playground-tokens .token").nth(4).click()
    weights = tasks.attention_of_layer(session, PROMPT, "base", layer)[2, 4]
    readout = page.locator("#attention-readout").inner_text()
    assert readout.startswith("Query “w6” (4), locked.")
    top = int(weights.argmax())
    assert f"Top keys: “{PROMPT.split()[top]}” ({top}) {weights.max():.3f}" in readout
    page.keyboard.press("Escape")
    expect(page.locator("#attention-readout")).to_contain_text("Point at a cell")
    page.locator("#attention-picture").focus()
    page.keyboard.press("ArrowUp")
    expect(page.locator("#attention-readout")).to_contain_text("Weight on “w6” (8)")
    expect(page.locator("#playground-continuation dd")).to_have_count(4)
    page.locator("#playground-all-heads").scroll_into_view_if_needed()
    expect(page.locator("#playground-all-heads .main-svg").first).to_be_visible()
    check_display(page)


@pytest.mark.browser
def test_results_of_an_earlier_prompt_are_marked_and_go_when_the_next_prompt_runs(page: Page) -> None:
    run_to_the_end(page, PROMPT)
    expect(page.locator("#playground-continuation dd")).to_have_count(2)
    expect(page.locator("#playground-outdated")).to_be_hidden()
    page.locator("#playground-prompt").fill("w1 w2 w3")
    expect(page.locator("#playground-outdated")).to_be_visible()
    page.route("**/_dash-update-component**", _hold_continuation)
    page.locator("#playground-run").click()
    expect(page.locator("#playground-tokens .token")).to_have_count(3)
    expect(page.locator("#playground-outdated")).to_be_hidden()
    expect(page.locator("#playground-continuation dd")).to_have_count(0)
    page.unroute("**/_dash-update-component**")


@pytest.mark.browser
def test_a_prompt_that_arrives_together_with_a_chosen_pair_shows_its_heads(page: Page) -> None:
    start = '{"output":"playground-all-heads.children"'
    with page.expect_request(lambda request: (request.post_data or "").startswith(start)) as asked:
        run_to_the_end(page, PROMPT)
    body = json.loads(asked.value.post_data or "")
    has_chart = {}
    for changed in (("playground-pair.data", "playground-prediction.data"), ("playground-pair.data",)):
        answer = page.evaluate(
            """(body) => fetch("/_dash-update-component", {
                method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
            }).then((response) => response.text())""",
            body | {"changedPropIds": changed},
        )
        has_chart[changed] = '"figure"' in answer
    assert [*has_chart.values()] == [True, False]


def _hold_continuation(route: Route) -> None:
    """Drop the request for the continuation."""
    if (route.request.post_data or "").startswith(CONTINUATION):
        route.fulfill(status=204)
    else:
        route.continue_()


def test_the_weight_of_every_head_from_one_token_to_another_is_that_of_eager_attention(session: ModelSession) -> None:
    for label in session.labels:
        with headscope.attached(session.model(label)):
            layers = eager_attention(session.model(label))
        values = tasks.pair_weights(session, PROMPT, label, 8, 3)
        expected = [float(weights[row.head, 8, 3]) for weights in layers for row in values[:4].itertuples()]
        np.testing.assert_allclose(values["value"], expected, atol=1e-5)
        values = tasks.pair_weights(session, PROMPT, label, 8, 3, 6)
        expected = [float(weights[row.head, 8, 3:7].sum()) for weights in layers for row in values[:4].itertuples()]
        np.testing.assert_allclose(values["value"], expected, atol=1e-5)
    with refuses(BadInput, 3, 8):
        tasks.pair_weights(session, PROMPT, "base", 3, 8)


@pytest.mark.browser
def test_two_clicked_tokens_show_the_weight_of_every_head_and_the_link_keeps_the_view(
    page: Page, session: ModelSession
) -> None:
    run_to_the_end(page, PROMPT, "L0H1")
    expect(page.locator("#playground-next th", has_text="base, ablated")).to_be_visible()
    expect(page.locator("#attention-readout")).to_contain_text("Point at a cell")
    tokens = page.locator("#playground-tokens .token")
    tokens.nth(8).click()
    expect(page.locator("#attention-readout")).to_contain_text("locked")
    tokens.nth(3).click()
    chart = page.locator("#playground-all-heads [aria-label^='Attention weight from “w6” (8) to “w5” (3): base']").first
    chart.scroll_into_view_if_needed()
    expect(chart.locator(".heatmaplayer image")).to_be_attached()
    expected = tasks.pair_weights(session, PROMPT, "base", 8, 3)["value"]
    shown = chart.evaluate(
        "(figure) => Array.from(figure.querySelector('.js-plotly-plot')._fullData[0].z, (row) => [...row])"
    )
    np.testing.assert_allclose(np.ravel(shown), expected, atol=1e-5)
    canvas = page.locator("#attention-canvas")
    box = canvas.bounding_box()
    assert box
    canvas.hover(position={"x": 0.55 * box["width"], "y": 0.7 * box["height"]})  # in a row of another query
    framed = re.search("Weight on (“.*” \\(\\d\\)): ", page.locator("#attention-readout").inner_text())
    assert framed
    assert "(3)" not in framed[1], "another pair than before"
    page.mouse.down()
    page.mouse.up()
    label = f"Attention weight from “w6” (8) to {framed[1]}"
    expect(page.locator(f"#playground-all-heads [aria-label^='{label}']").first).to_be_attached()
    page.locator("#attention-heads button").nth(2).click()
    page.wait_for_function("location.search.includes('playground=')")
    title = page.locator("#attention-title").inner_text()
    other = page.context.new_page()
    other.goto(page.url)
    expect(other.locator(f"#playground-all-heads [aria-label^='{label}']").first).to_be_attached()
    expect(other.locator("#playground-prompt")).to_have_value(PROMPT)
    expect(other.locator("#playground-heads")).to_have_value("L0H1")
    expect(other.locator("#playground-next th", has_text="base, ablated")).to_be_visible()
    expect(other.locator("#attention-title")).to_have_text(title)
    other.close()
    page.keyboard.press("Escape")


@pytest.mark.browser
def test_selected_text_is_a_span_and_every_head_shows_its_weight_on_it(page: Page, session: ModelSession) -> None:
    run_to_the_end(page, PROMPT)
    expect(page.locator("#attention-readout")).to_contain_text("Point at a cell")
    first, last = (page.locator("#playground-tokens .token").nth(position).bounding_box() for position in (2, 5))
    assert first
    assert last
    page.mouse.move(first["x"] + 2, first["y"] + first["height"] / 2)
    page.mouse.down()
    page.mouse.move(last["x"] + last["width"] - 2, last["y"] + last["height"] / 2, steps=5)
    page.mouse.up()
    expect(page.locator("#playground-tokens .in-span")).to_have_count(4)
    chart = page.locator("#playground-all-heads [aria-label^='Attention weight from “w6” (8) to “w7” (2) … “w9” (5)']")
    chart.first.scroll_into_view_if_needed()
    expect(chart.first.locator(".heatmaplayer image")).to_be_attached()
    shown = chart.first.evaluate(
        "(f) => Array.from(f.querySelector('.js-plotly-plot')._fullData[0].z, (row) => [...row])"
    )
    expected = tasks.pair_weights(session, PROMPT, "base", 8, 2, 5)["value"]
    np.testing.assert_allclose(np.ravel(shown), expected, atol=1e-5)
    page.keyboard.press("Escape")


@pytest.mark.browser
def test_selected_heads_go_into_the_box_of_the_page_and_the_prompt_stays(page: Page) -> None:
    address = page.url
    page.goto(f"{address.split('?')[0]}?heads=L1H2")
    page.locator("#playground-prompt").fill(PROMPT)
    page.get_by_role("link", name="Ablate in the playground").click()
    expect(page.locator("#playground-heads")).to_have_value("L1H2")
    expect(page.locator("#playground-prompt")).to_have_value(PROMPT)
    page.goto(address.split("?")[0])


@pytest.mark.parametrize(
    "text", ["[", "[1]", '{"prompt": 3, "model": "none", "pair": [1], "layer": "x", "scale": "no", "a": "b"}']
)
def test_invalid_entries_of_a_link_are_left_out(text: str) -> None:
    assert parse_view(text, ["base"], ["pair"]) == {}


@pytest.mark.browser
def test_a_head_chosen_while_a_layer_loads_stays_chosen(page: Page) -> None:
    run_to_the_end(page, PROMPT)
    title = page.locator("#attention-title")
    expect(title).to_contain_text(re.compile("Attention of L[01]H"))
    page.locator("#attention-heads button").nth(0).click()
    expect(title).to_contain_text("H0: base")
    other = "1" if "L0" in title.inner_text() else "0"
    held: list[Route] = []
    pattern = "**/_dash-update-component**"

    def is_of_the_layer(request: Request) -> bool:
        return '"changedPropIds":["playground-layer.value"]' in (request.post_data or "")

    page.route(pattern, lambda route: held.append(route) if is_of_the_layer(route.request) else route.continue_())
    try:
        with page.expect_request(is_of_the_layer):
            page.locator("#playground-layer").click()
            page.get_by_role("option", name=other, exact=True).click()
        page.locator("#attention-heads button").nth(3).click()
    finally:
        for route in held:
            route.continue_()
        page.unroute(pattern)
    expect(title).to_contain_text(f"L{other}H3: base")


@pytest.mark.browser
def test_keep_stores_the_shown_prompt_as_a_run(page: Page, runs: Path) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    run_to_the_end(page, PROMPT, "L0H1")
    expect(page.locator("#playground-next th", has_text="yarn, ablated")).to_be_visible()
    page.locator("#playground-keep").click()
    link = page.locator("#playground-kept a")
    expect(link).to_be_visible()
    name = link.inner_text()
    assert (runs / name / "run.json").is_file()
    link.click()
    expect(page.locator("main")).to_contain_text(name)
    page.locator("nav a", has_text="Runs").first.click()
    expect(page.locator(".ag-cell", has_text=name)).to_be_visible()
    page.goto(page.url.split("/runs")[0] + "/playground")


def check_display(page: Page) -> None:
    """The page fits both widths and is accessible in both themes."""
    for width, scheme in ((1440, "light"), (820, "dark")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.wait_for_function("(width) => document.documentElement.scrollWidth <= width", arg=width)
        page.wait_for_selector(f"html[data-mantine-color-scheme={scheme}]", state="attached")
        page.wait_for_function(
            "() => document.getAnimations().every(a => !(a instanceof CSSTransition))"
        )  # half-way colours
        violations = Axe().run(page).response["violations"]
        assert [(item["id"], item["nodes"][0]["html"][:200]) for item in violations] == []


@pytest.mark.browser
def test_mistakes_and_a_dead_process_give_one_sentence(page: Page, app: Flask) -> None:
    message = page.locator("#playground-message")
    expect(page.locator("#playground-results")).to_be_visible()
    for prompt, heads, named in (
        ("", "", "empty"),
        ("w1 " * 2100, "", "2,048"),
        (PROMPT, "L9H0", "L9H0"),
    ):
        run_prompt(page, prompt, heads)
        expect(message).to_contain_text(named)
        expect(page.locator("#playground-results")).to_be_hidden()
    process = app.config["PLAYGROUND_WORKER"].process_id
    os.kill(process, signal.SIGKILL)
    while Path(f"/proc/{process}").exists():
        time.sleep(0.01)
    run_prompt(page, PROMPT)
    expect(page.locator("#playground-tokens .token")).to_have_count(9)
    expect(message).to_be_empty()
