"""The Python interface refuses values of the wrong type with BadInput, in one line, before anything is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tiny_studies import save_checkpoint

import headscope as hs
from headscope import plugins
from headscope.errors import BadInput

CALLS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "no-model": ("the model of measure is None. Give a model spec", lambda tiny: hs.measure(None)),
    "no-model-to-adapt": ("the model of adapt is None", lambda tiny: hs.adapt(None)),
    "no-model-of-a-label": ("unsupported model object 'NoneType'", lambda tiny: hs.measure({"base": None})),
    "number-as-model": ("unsupported model object 'int'", lambda tiny: hs.measure(5)),
    "no-models": ("no model. Give at least one", lambda tiny: hs.measure({})),
    "number-as-label": ("models.5 must be a string", lambda tiny: hs.measure({5: tiny})),
    "no-out": ("out is None, not a path", lambda tiny: hs.measure(tiny, out=None)),
    "number-as-out": ("out is 5, not a path", lambda tiny: hs.measure(tiny, out=5)),
    "number-as-study": ("study is 5, not a path", lambda tiny: hs.run_study(5)),
    "no-study": ("study is None, not a path", lambda tiny: hs.run_study(None)),
    "study-out": ("out is 5, not a path", lambda tiny: hs.run_study({"models": {"a": tiny}, "measure": {}}, 5)),
    "text-as-resume": ("resume must be True or False: 'x'", lambda tiny: hs.measure(tiny, resume="x")),
    "number-as-quiet": ("quiet must be True or False: 1", lambda tiny: hs.measure(tiny, quiet=1)),
    "number-as-run": ("run is 5, not a path", lambda tiny: hs.Run.open(5)),
    "no-run": ("run is None, not a path", lambda tiny: hs.Run.open(None)),
    "load-number": ("unsupported model object 'int'", lambda tiny: hs.load(5)),
    "load-none": ("unsupported model object 'NoneType'", lambda tiny: hs.load(None)),
    "load-list": ("unsupported model object 'list'", lambda tiny: hs.load([tiny])),
    "in-memory-dtype": (
        "the model in memory has dtype torch.float32, not bf16",
        lambda tiny: hs.measure(hs.load(tiny, device="cpu"), dtype="bf16"),
    ),
    "in-memory-device": (
        "device 'cuda:99' cannot be used",
        lambda tiny: hs.measure(hs.load(tiny, device="cpu").module, device="cuda:99"),
    ),
    "no-device": ("device 'None' cannot be used", lambda tiny: hs.load(tiny, device=None)),
    "no-dtype": ("unknown dtype 'None'", lambda tiny: hs.load(tiny, device="cpu", dtype=None)),
    "number-as-text": ("texts.source must be a string", lambda tiny: hs.measure(tiny, text=5)),
    "number-as-name": ("name must be a string", lambda tiny: hs.measure(tiny, name=5)),
    "number-as-engine": ("engine must be a mapping (key: value)", lambda tiny: hs.measure(tiny, engine=5)),
    "text-as-docs": ("texts.docs must be an integer", lambda tiny: hs.measure(tiny, docs="x")),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_value_of_the_wrong_type_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message, call = CALLS[name]
    monkeypatch.chdir(tmp_path)
    tiny = str(save_checkpoint(tmp_path / "tiny"))
    with pytest.raises(BadInput) as refused:
        call(tiny)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_an_unknown_option_of_a_function_names_the_similar_one() -> None:
    with pytest.raises(TypeError, match=r"option 'length'.*'lengths'"):
        hs.measure("smollm2-135m", length=[64])


def test_dir_lists_the_public_interface_only() -> None:
    public = {*hs.__all__, "__version__", *(probe.function_name for probe in plugins.requestable_probes().values())}
    assert {*dir(hs)} == public
    assert all(getattr(hs, name).__doc__ for name in public)
