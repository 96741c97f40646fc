"""Kinds of ablation by name: one syntax and one help text for every option that takes them."""

import math
import re
from collections.abc import Collection, Mapping
from types import MappingProxyType

from headscope.base.user_input import quote
from headscope.errors import did_you_mean
from headscope.streaming import StreamingWindow, is_streaming

MAX_FACTOR = 1e6
"""Largest factor on head outputs and their noise; beyond it a model's activations are no longer finite."""
MEAN_OF_TEXT = "mean:text"
MEAN_OF_DOCUMENT = "mean:document"
MEAN_OF_PROMPTS = "mean:prompts"
KIND_HELP = {
    "zero": "zero: z = 0",
    MEAN_OF_TEXT: "mean:text, or mean: z is its mean over the first 512 tokens of --text (fewer in a model with a "
    "shorter context)",
    MEAN_OF_DOCUMENT: "mean:document: z is its mean over the same document or prompt",
    "resample": "resample: z is that of the same positions in another prompt of the set, drawn from the prompts with "
    "the same number of tokens",
    "scale:F": "scale:F: z times F",
    "noise:S": "noise:S: z plus Gaussian noise of S times its standard deviation over the same document or prompt",
    "uniform": "uniform: equal weights on all visible keys",
    "streaming:S+R": "streaming:S+R: the head attends to the first S and last R tokens only",
    "RULE": "a rule with its sizes, such as top:64: the head attends to the keys that the rule chooses",
}
"""What every kind does, in the text of options. RULE stands for every rule that chooses keys."""
KINDS = tuple(kind for kind in KIND_HELP if kind != "RULE")
"""The kinds in messages."""
_NEEDS_TEXT = "needs the whole text in one pass, and the model generates token by token"
NOT_OF_DOCUMENTS = MappingProxyType({"resample": "takes outputs from other prompts of a set, and there is none"})
"""Kinds that a text without other prompts does not have, and why."""
NOT_IN_GENERATION = MappingProxyType({MEAN_OF_DOCUMENT: _NEEDS_TEXT, "noise:S": _NEEDS_TEXT, **NOT_OF_DOCUMENTS})
"""Kinds that a model that generates with a cache does not have, and why."""
RULE_PATTERN = re.compile(r"[a-z][a-z0-9-]*(:[0-9]{1,8})+")
"""The form of a rule; the names are those of installed rules, which need torch."""


def kinds_help(left_out: Collection[str] = ()) -> str:
    """What the kinds do, for the help of an option that takes all but `left_out`."""
    return "; ".join(text for kind, text in KIND_HELP.items() if kind not in left_out)


def ablation_name(text: str, left_out: Mapping[str, str] = MappingProxyType({}), others: Collection[str] = ()) -> str:
    """The kind of ablation that a text names, written in one way; bare mean is mean:text.

    Raises ValueError for any other text, naming the `others` that an option takes, for mean:prompts, which is for
    circuits of heads only, and for a kind of `left_out`, with its reason. A rule is checked by its form only.
    """
    name, _, size = text.partition(":")
    if text == MEAN_OF_PROMPTS:
        raise ValueError(
            f"{MEAN_OF_PROMPTS} is a mean over other prompts, which only the complement of a circuit has. Use "
            f"{MEAN_OF_TEXT}"
        )
    family = next((kind for kind in KINDS if kind.partition(":")[0] == name and kind[-2:] in (":F", ":S")), text)
    if family == "mean":
        family = MEAN_OF_TEXT
    kind = f"{name}:{_factor(text, size)}" if family in ("scale:F", "noise:S") else family
    if is_streaming(text) and text.count(":") == 1:
        family, kind = "streaming:S+R", str(StreamingWindow.parse(text))
    is_rule = name not in ("zero", "mean", "resample", "uniform") and RULE_PATTERN.fullmatch(text)
    if family in left_out:
        accepted = ", ".join(other for other in KINDS if other not in left_out)
        raise ValueError(f"{quote(text)} {left_out[family]}. Use one of: {accepted}, or a rule such as top:64")
    if text == "streaming":
        raise ValueError("ablation 'streaming' has no sizes. Use streaming:S+R, such as streaming:4+64")
    if family not in KINDS and not is_rule:
        names = [*(other for other in KINDS if other not in left_out), *others]
        raise ValueError(
            f"unknown ablation {quote(text)}{did_you_mean(text, [*names, 'mean'])}. Use one of: {', '.join(names)}, or "
            "a rule with its sizes, such as top:64"
        )
    return kind


def _factor(text: str, size: str) -> str:
    """The factor of a kind, in its shortest form. Raises ValueError for what is no number of at most MAX_FACTOR."""
    try:
        factor = float(size)
    except ValueError:
        factor = math.nan
    if not math.isfinite(factor):
        raise ValueError(f"ablation {quote(text)} has no finite factor. Write scale:0.5 or noise:0.1")
    if abs(factor) > MAX_FACTOR:
        raise ValueError(f"ablation {quote(text)} has too large a factor. Use at most {MAX_FACTOR:,.0f}")
    if factor < 0 and text.startswith("noise:"):
        raise ValueError(f"ablation {quote(text)} has a negative size of the noise. Write noise:{-factor:g}")
    short = f"{factor:g}"
    return short if float(short) == factor else repr(factor)


def ablation_in_generation(text: str) -> str:
    """The kind of ablation of a model that generates with a cache, see `ablation_name`."""
    return ablation_name(text, NOT_IN_GENERATION)


def describe_ablation(kind: str) -> str:
    """A kind in sentences, as in "mean ablation (mean:text)"; any other text is returned as it is."""
    name, _, size = kind.partition(":")
    if is_streaming(kind) and kind.count(":") == 1:
        return StreamingWindow.parse(kind).description
    if kind in ("zero", "resample", "mean"):
        return f"{kind} ablation"
    if name == "mean":
        return f"mean ablation ({kind})"
    if kind == "uniform":
        return "uniform attention"
    if name == "scale":
        return f"output scaled by {size}"
    if name == "noise":
        return f"noise of {size} standard deviations"
    if name == "streaming":
        return "streaming attention"
    return f"attention by {kind}" if RULE_PATTERN.fullmatch(kind) else kind


def column_part(kind: str) -> str:
    """The kind in names of columns: mean_text for mean:text."""
    return kind.replace(":", "_").replace("+", "_")
