"""The rope settings that a config.json may carry: what headscope reads, and the values that the tests compare.

`python -m tests.support.rope_settings` rewrites the table of config.json in docs/positions.md.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

PAGE = Path(__file__).parents[2] / "docs" / "positions.md"
START, END = "<!-- config.json settings: generated -->", "<!-- end of config.json settings -->"
MODULES = "rotary module of transformers: `test_rope_settings.py::test_own_frequencies_and_temperatures`"
SCHEMES = "`test_rope_settings.py::test_schemes_equal_the_config_with_that_scheme`"


@dataclass(frozen=True)
class RopeSetting:
    """A key of config.json, the rope types that use it, what headscope reads from it, and by which comparison that was
    verified. The property test draws `values`; None leaves the key out."""

    key: str
    rope_types: tuple[str, ...]
    reading: str
    comparison: str = MODULES
    values: tuple[Any, ...] = ()


YARN = ("yarn",)
SETTINGS = (
    RopeSetting(
        "rope_type",
        (),
        "how frequencies are computed; schemes replace it",
        values=("default", "linear", "dynamic", "yarn", "llama3", "longrope"),
    ),
    RopeSetting("rope_theta", (), "base of the frequencies; schemes start from it", values=(50.0, 1e4, 5e5, 1e7)),
    RopeSetting("partial_rotary_factor", (), "share of a head that rotates; schemes keep it", values=(0.25, 0.5, 1.0)),
    RopeSetting(
        "max_position_embeddings",
        (),
        "native context; the length up to which `dynamic` keeps its frequencies",
        values=(64, 96, 256),
    ),
    RopeSetting(
        "original_max_position_embeddings",
        ("yarn", "llama3", "longrope"),
        "original context, from which schemes start; the length up to which `longrope` uses `short_factor`. "
        "`dynamic` ignores it",
        values=(24, 48, 64, 160),
    ),
    RopeSetting(
        "factor",
        ("linear", "dynamic", "yarn", "llama3", "longrope"),
        "factor on wavelengths. With `linear` the original context is the native one divided by it; with `yarn` the "
        "native context is at least the original one times it",
        values=(1.0, 2.0, 4.0, 13.7, 40.0),
    ),
    RopeSetting(
        "attention_factor",
        ("yarn", "longrope"),
        "factor on cos and sin. Schemes replace it",
        values=(None, 1.0, 1.31),
    ),
    RopeSetting("beta_fast", YARN, "end of YaRN's ramp; @yarn keeps it", values=(None, 16.0, 48.0)),
    RopeSetting("beta_slow", YARN, "end of YaRN's ramp; @yarn keeps it", values=(None, 1.0, 2.0)),
    RopeSetting("truncate", YARN, "whole pairs as ends of YaRN's ramp; @yarn keeps it", values=(None, True, False)),
    RopeSetting("mscale", YARN, "numerator of the factor on cos and sin; @yarn keeps it", values=(None, 0.707, 1.0)),
    RopeSetting(
        "mscale_all_dim",
        YARN,
        "denominator of the factor on cos and sin and, in latent attention, factor on all logits; @yarn keeps it, "
        "other schemes drop it",
        "softmax scale and logits of transformers: `test_rope_settings.py::"
        "test_schemes_replace_the_softmax_factor_of_each_family`",
        values=(None, 0.707, 1.0),
    ),
    RopeSetting("low_freq_factor", ("llama3",), "end of Llama 3's ramp", values=(1.0, 2.0)),
    RopeSetting("high_freq_factor", ("llama3",), "end of Llama 3's ramp", values=(4.0, 8.0)),
    RopeSetting(
        "short_factor", ("longrope",), "factor on each wavelength up to the original length", values=(1.0, 3.0)
    ),
    RopeSetting("long_factor", ("longrope",), "factor on each wavelength of longer texts", values=(1.5, 8.0)),
    RopeSetting(
        "full_attention, sliding_attention",
        (),
        "settings of the layers of one type; schemes change the full-attention layers only",
    ),
    RopeSetting(
        "proportional (a rope_type)",
        (),
        "Gemma 4: frequencies over the whole head, 0 beyond the share; schemes keep the zeros",
        "eager attention: `tests/zoo`, layouts of Gemma 4",
    ),
    RopeSetting(
        "llama_4_scaling_beta",
        (),
        "Mistral 4, Ministral 3: factor on queries beyond the original length, by the family's code; schemes keep it",
        "eager attention: `tests/zoo`",
    ),
    RopeSetting(
        "short_mscale, long_mscale",
        ("longrope",),
        "Phi-3.5-MoE: factor on cos and sin, from the rotation itself. Texts beyond the original length have no "
        "position tables, because the code does not use `long_factor`",
        "`test_special_families.py`",
    ),
    RopeSetting(
        "mrope_section",
        (),
        "parts of a head for time, height and width, whose positions are equal for text; images are refused",
        "`test_rotary_variants.py::test_scheme_refuses_image_positions`",
    ),
    RopeSetting(
        "alpha",
        ("dynamic",),
        "Hunyuan: frequencies are those of its module; schemes are refused, because the config does not determine them",
        "`test_rope_settings.py::test_schemes_on_hunyuan_alpha_are_refused`",
    ),
)
VALUES: Mapping[str, tuple[Any, ...]] = {setting.key: setting.values for setting in SETTINGS if setting.values}


@st.composite
def rope_parameters(draw: st.DrawFn, pairs: int, *, latent: bool = False) -> dict[str, Any]:
    """Valid rope settings of any type for `pairs` rotary pairs; `latent`: for a family with factors on all logits."""
    rope_type = draw(st.sampled_from(VALUES["rope_type"]))
    rope: dict[str, Any] = {"rope_type": rope_type}
    for setting in SETTINGS:
        key = setting.key
        is_used = rope_type in setting.rope_types or key == "rope_theta"
        if not setting.values or not is_used or (key.startswith("mscale") and not latent):
            continue
        if key in ("short_factor", "long_factor"):
            rope[key] = draw(st.lists(st.floats(*setting.values), min_size=pairs, max_size=pairs))
        elif (value := draw(st.sampled_from(setting.values))) is not None:
            rope[key] = value
    return rope


def rotary_factor_of_yarn(factor: float) -> float:
    """YaRN's factor on cos and sin (Peng et al. 2023, eq. 22)."""
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def table() -> str:
    """The settings as a Markdown table."""
    rows = ["| setting | rope types | headscope reads | compared with |", "|---|---|---|---|"]
    for setting in SETTINGS:
        types = ", ".join(f"`{name}`" for name in setting.rope_types) or "all"
        keys = ", ".join(f"`{key}`" for key in setting.key.split(", ")) if "(" not in setting.key else setting.key
        rows.append(f"| {keys} | {types} | {setting.reading} | {setting.comparison} |")
    return "\n".join(rows)


def page_with_table(page: str) -> str:
    """The page with the present table between its markers."""
    before, rest = page.split(START)
    return f"{before}{START}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
