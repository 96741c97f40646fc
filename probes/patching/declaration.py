"""Options and stored tables of activation patching."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from headscope.base.model_identity import WEIGHTS_OPTION, AcceptedWeights
from headscope.prompts.pairs import OWN_METRIC, RESERVED_SPAN_NAMES, metric_unit
from headscope.runs.columns import ANSWER_METRIC, GROUP, HEAD, LAYER, MODEL, Column, Table, key
from headscope.study.answer_options import (
    GENERATED,
    HEADS_HELP,
    PAIRS_HELP,
    PLACES_HELP,
    AnswerOptions,
    HeadNames,
    PairSources,
    PositionNames,
)
from headscope.study.option_rules import Needs, Rule

MIN_DIFFERENCE, MIN_PROBABILITY = 0.5, 0.05
"""Least |m(clean) - m(corrupted)| of a pair whose effects are normalised, in logits, nats or ranks, and in
probabilities [ours]."""
MIN_OWN_DIFFERENCE = 1e-4
"""The same for a metric of the user, whose unit is unknown: relative to the larger of the two values [ours]. A
difference within the rounding of float32 logits would make any effect."""


def min_difference(metric: str) -> float:
    """The least difference of a metric between the prompts of a pair whose effects are normalised.

    A metric of the user, whose unit is unknown, has the relative bound `MIN_OWN_DIFFERENCE` instead.
    """
    return 0.0 if metric.startswith(OWN_METRIC) else MIN_PROBABILITY if metric == "prob_diff" else MIN_DIFFERENCE


def describe_min_difference(metric: str) -> str:
    """The least difference in words."""
    if metric.startswith(OWN_METRIC):
        return f"{100 * MIN_OWN_DIFFERENCE:g} % of the metric"
    return f"{min_difference(metric):g} {metric_unit(metric)}"


def is_normalised(clean: float, corrupted: float, metric: str) -> bool:
    """Whether the metric differs enough between the prompts of a pair to divide by the difference."""
    least = MIN_OWN_DIFFERENCE * max(abs(clean), abs(corrupted)) if metric.startswith(OWN_METRIC) else 0.0
    difference = abs(clean - corrupted)
    return difference > least and difference >= min_difference(metric)


def effect_columns(
    patched: Any, clean: float, corrupted: float, direction: str, metric: str = "logit_diff"
) -> dict[str, Any]:
    """The value columns of patched metrics (a scalar or an array)."""
    unpatched, source = (corrupted, clean) if direction == "denoising" else (clean, corrupted)
    differs = is_normalised(clean, corrupted, metric)
    effect = (patched - unpatched) / (source - unpatched) if differs else 0 * patched
    return {
        "metric_clean": clean,
        "metric_corrupted": corrupted,
        "metric_patched": patched,
        "is_normalised": differs,
        "is_counted": differs,
        "effect": effect,
    }


MAX_UNITS = 1_000_000
"""More units than any model has."""

MAX_ENTRY_TOKENS = 128
"""Most tokens of a prompt whose patterns are patched entry by entry: 8,256 entries of every head [ours]."""

HeadActivation = Literal["z", "q", "k", "v", "pattern"]
LayerActivation = Literal["resid_pre", "attn_out", "mlp_out"]
ACTIVATIONS: tuple[HeadActivation, ...] = get_args(HeadActivation)
LAYER_ACTIVATIONS: tuple[LayerActivation, ...] = get_args(LayerActivation)
ACTIVATION_LABELS: Mapping[str, str] = {
    "z": "head output z",
    "q": "queries",
    "k": "keys",
    "v": "values",
    "pattern": "attention pattern",
}
"""Activations of heads, or of KV groups."""
LAYER_ACTIVATION_LABELS: Mapping[str, str] = {
    "resid_pre": "residual stream before the layer",
    "attn_out": "output of the attention layer",
    "mlp_out": "output of the MLP",
}
ALL_POSITIONS = -1
"""Value of `position` for a patch of all positions."""
WHOLE_GROUP = -1
"""Value of `head` for a patch of a KV group."""

EXACT_SECONDS = 60.0
"""Longest predicted time at which the method auto patches everything exactly."""
REFERENCE_SPEED = 1e11
"""Floating-point operations per second of the prediction, about those of two cores [ours]. It is fixed, so that the
choice of a method does not depend on the machine and a run can be repeated."""

Method = Literal["auto", "exact", "estimate", "verify"]


class PairOptions(AnswerOptions):
    """Sets of prompt pairs, the metric of their answers, and the run that is patched."""

    option_rules: ClassVar[tuple[Rule, ...]] = (
        Needs("metric=rank", "method=exact|auto", "rank has no gradient"),
        Needs("verify_top verify_random", "method=verify|auto"),
        Needs("align", f"pairs!={GENERATED}", "it is for files of pairs"),
    )

    pairs: PairSources = Field(["ioi"], min_length=1, description=PAIRS_HELP)
    directions: list[Literal["denoising", "noising"]] = Field(
        ["denoising"],
        min_length=1,
        description="denoising: clean activations in the corrupted run; noising: corrupted activations in the clean "
        "run",
    )
    align: Literal["equal", "end"] = Field(
        "equal",
        description="equal: both prompts must have the same number of tokens; end: patch only the last tokens that "
        "both prompts of a pair share. For files of pairs",
    )
    method: Method = Field("auto")
    verify_top: int = Field(10, ge=1, le=MAX_UNITS)
    verify_random: int = Field(10, ge=0, le=MAX_UNITS)

    @property
    def needs_exact(self) -> bool:
        """Whether there is no estimate of what these options patch."""
        return self.metric == "rank"

    def choose_method(self, operations: float) -> Method:
        """The method of all sets and models; of auto the one that the cost decides: the number of floating-point
        operations of all exact effects."""
        if self.method != "auto":
            return self.method
        seconds = operations / REFERENCE_SPEED
        is_verify_set = {"verify_top", "verify_random"} & self.model_fields_set
        return "exact" if self.needs_exact or (seconds < EXACT_SECONDS and not is_verify_set) else "verify"


class PatchingOptions(PairOptions):
    """Activation patching: run one prompt of a pair with an activation of the other run."""

    option_rules = (
        Needs("pattern_entries", "activations=pattern"),
        Needs("heads!=all", f"activations={'|'.join(ACTIVATIONS)}", "the others are of whole layers"),
    )

    activations: list[HeadActivation | LayerActivation] = Field(
        ["z"],
        min_length=1,
        description="activations to patch: z (head output), q, k (after rotation), v, pattern (attention weights); of "
        "whole layers: resid_pre (residual stream before the layer), attn_out, mlp_out (what attention or MLP adds)",
    )
    positions: PositionNames = Field(
        ["all"],
        min_length=1,
        description="all: patch all positions together; each: also every position of the prompt separately, which "
        f"verify only estimates; or also those of {PLACES_HELP}",
    )
    method: Method = Field(
        "auto",
        description="exact: patch every head, KV group or layer; estimate: attribution patching (one backward pass); "
        "verify: estimate all, patch those of --verify-top and --verify-random, and every layer; auto: exact if that "
        "takes less than a minute on two cores, else verify",
    )
    verify_top: int = Field(
        10,
        ge=1,
        le=MAX_UNITS,
        description="number of heads or KV groups to patch exactly, those whose estimates change the "
        "metric most (root mean square over pairs), per model, set, activation and direction; in a set of few pairs "
        "also as many of each pair, else of each group, half of them the highest and half the lowest estimates",
    )
    verify_random: int = Field(
        10,
        ge=0,
        le=MAX_UNITS,
        description="number of other heads or KV groups to patch exactly, drawn at random; all if there are fewer",
    )
    heads: HeadNames = Field(
        ["all"],
        min_length=1,
        description=f"heads to patch one at a time, such as L18H6; all: every head; {HEADS_HELP}. Named heads, or "
        "their KV groups, are also patched together, unless the method is estimate",
    )
    weights: AcceptedWeights = Field("same", description=WEIGHTS_OPTION)

    pattern_entries: bool = Field(
        False,
        description="for the activation pattern: also every entry of the pattern separately, a destination (query) and "
        f"a source (key), which verify only estimates; for prompts of at most {MAX_ENTRY_TOKENS} tokens",
    )

    @model_validator(mode="after")
    def _refuse_the_whole_residual_stream(self) -> Self:
        if "resid_pre" in self.activations and {*self.positions} == {"all"} and self.align == "equal":
            raise ValueError(
                "'resid_pre' at all positions is the other run itself: its effect is 1 in every layer. Add the "
                "positions 'each', 'last' or a named span"
            )
        return self

    @property
    def are_heads_named(self) -> bool:
        """Whether only some heads are patched, and all of them together as well."""
        return self.heads != ["all"]

    @property
    def by_position(self) -> bool:
        """Whether every position is also patched separately."""
        return "each" in self.positions

    @property
    def span_names(self) -> list[str]:
        """The named spans to patch."""
        return [name for name in self.positions if name not in RESERVED_SPAN_NAMES]


PROMPTS = key("prompts", "label", "", "set of prompt pairs: a generated set, or the name of a file", None)
PAIR_NAME = key("pair", "label", "", "name of the prompt pair within its set", None)
POSITION = key(
    "position", "index32", "tokens", "patched position of the clean prompt; -1: all positions", ALL_POSITIONS
)

DIRECTION = key(
    "direction",
    "label",
    "",
    "denoising: clean activation in the corrupted run; noising: corrupted activation in the clean run",
    None,
)
UNIT = (
    key("head", "index16", "", "query head within the layer, from 0; -1 if the unit is a KV group (k, v)", -1),
    GROUP,
    key("activation", "label", "", "patched activation: z, q, k, v or pattern (q and k)", None),
)
METHOD = key(
    "method",
    "label",
    "",
    "exact: the run was patched; estimate: first order in the head's output z, for kl and noising second order",
    None,
)
VALUES = (
    Column("group", "label", "", "kind of pair within its set"),
    Column("metric_clean", "value", "logits, nats", "metric of the clean run"),
    Column("metric_corrupted", "value", "logits, nats", "metric of the corrupted run"),
    Column("metric_patched", "value", "logits, nats", "metric of the patched run, or its estimate"),
    Column(
        "is_normalised",
        "flag",
        "",
        f"whether clean and corrupted metric differ by at least {MIN_DIFFERENCE} (prob_diff: {MIN_PROBABILITY}; a "
        f"metric of the user: by more than {MIN_OWN_DIFFERENCE:g} of the larger one); means leave out others [ours]",
    ),
    Column(
        "is_counted",
        "flag",
        "",
        "whether means include the pair: is_normalised, the model gives the answer to the clean prompt, and the two "
        "prompts do not prefer the same answer; with keep_failing, is_normalised",
    ),
    Column(
        "effect",
        "value",
        "",
        "share of the metric's difference that the patch moves: (patched - unpatched) / (source - unpatched); 0 "
        "without effect, 1 if the patched metric equals that of the run that the activation comes from; 0 where "
        "is_normalised is false",
    ),
)
"""Value columns of a patch."""

PATCHING = Table(
    "patching",
    "metric of one prompt of a pair when one unit's activation comes from the run of the other prompt",
    (
        MODEL,
        PROMPTS,
        PAIR_NAME,
        LAYER,
        *UNIT,
        POSITION,
        DIRECTION,
        ANSWER_METRIC,
        METHOD,
        *VALUES,
    ),
)
PATCHING_TOKENS = Table(
    "patching_tokens",
    "tokens of the prompts that were patched by position or by pattern entry",
    (
        MODEL,
        PROMPTS,
        PAIR_NAME,
        key("position", "index32", "tokens", "position in the clean prompt"),
        Column("clean", "text", "", "token of the clean prompt"),
        Column("corrupted", "text", "", "token of the corrupted prompt at the corresponding position"),
    ),
)
PATCHING_SPANS = Table(
    "patching_spans",
    "metric of one prompt of a pair when one unit's activation at the positions of a named span comes from the run of "
    "the other prompt",
    (
        MODEL,
        PROMPTS,
        PAIR_NAME,
        LAYER,
        *UNIT,
        key("span", "label", "", "name of the patched span of positions", None),
        DIRECTION,
        ANSWER_METRIC,
        METHOD,
        Column("first", "index32", "tokens", "first position of the span in the clean prompt", 0),
        Column("last", "index32", "tokens", "last position of the span in the clean prompt", 0),
        *VALUES,
    ),
)
PATCHING_LAYERS = Table(
    "patching_layers",
    "metric of one prompt of a pair when the residual stream before a decoder layer, or what its attention or MLP adds "
    "to it, comes from the run of the other prompt",
    (
        MODEL,
        PROMPTS,
        PAIR_NAME,
        LAYER,
        key("activation", "label", "", "patched activation: resid_pre, attn_out or mlp_out", None),
        key("position", "index32", "tokens", "first patched position of the clean prompt; -1: all", ALL_POSITIONS),
        key("span", "label", "", "name of the patched span; empty for all positions or a single one", None),
        DIRECTION,
        ANSWER_METRIC,
        key(
            "method", "label", "", "exact: the run was patched; estimate: first order, for kl and noising second", None
        ),
        Column("last", "index32", "tokens", "last patched position of the clean prompt; -1: all", ALL_POSITIONS),
        *VALUES,
    ),
)
PATCHING_SETS = Table(
    "patching_sets",
    "metric of one prompt of a pair when the activations of all named heads, or of their KV groups, come from the run "
    "of the other prompt",
    (
        MODEL,
        PROMPTS,
        PAIR_NAME,
        key("activation", "label", "", "patched activation: z, q, k, v or pattern (q and k)", None),
        key("span", "label", "", "name of the patched span of positions; empty for all positions", None),
        DIRECTION,
        ANSWER_METRIC,
        Column("size", "count", "", "heads or KV groups that are patched together", 1),
        *VALUES,
    ),
)
PATCHING_ENTRIES = Table(
    "patching_entries",
    "metric of one prompt of a pair when one entry of a head's attention pattern comes from the run of the other "
    "prompt, without normalising its row again",
    (
        MODEL,
        PROMPTS,
        PAIR_NAME,
        LAYER,
        HEAD,
        GROUP,
        key("destination", "index32", "tokens", "position of the query in the clean prompt"),
        key("source", "index32", "tokens", "position of the key in the clean prompt, at most the destination"),
        DIRECTION,
        ANSWER_METRIC,
        METHOD,
        *VALUES,
    ),
)
TABLES = (PATCHING, PATCHING_TOKENS, PATCHING_SPANS, PATCHING_LAYERS, PATCHING_SETS, PATCHING_ENTRIES)
