"""Options, tables and questions of the influence probe."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from headscope.base.ablation_names import NOT_OF_DOCUMENTS, kinds_help
from headscope.base.head_set import HeadSet
from headscope.base.heads import format_head
from headscope.base.user_input import MAX_LENGTH
from headscope.results.effects.results import sweep_questions
from headscope.results.questions import Question
from headscope.runs.columns import DOC, GROUP, LAYER, LENGTH, MODEL, Column, Table, key
from headscope.runs.head_names import head_names
from headscope.study.config import Options
from headscope.study.option_rules import Excludes, Needs
from probes.influence import bands

MAX_UNITS = 1_000_000
"""More units than any model has."""


class InfluenceOptions(Options):
    """Head influence: change of the loss when the position parameters of one unit are reset or the unit is ablated."""

    option_rules = (
        Excludes("heads", "unit=group"),
        Needs("depths needles", "objectives=answer", "the facts are what the answers are about"),
        Needs("verify_top verify_random", "method=verify"),
        Needs("estimate_order", "method=estimate|verify"),
        Needs("draws", "curve", "random sets stand beside those of the curve"),
    )

    models: list[str] | None = Field(None, min_length=1, description="labels of the models to sweep; default all")
    lengths: list[Annotated[int, Field(ge=2, le=MAX_LENGTH)]] = Field(
        [1024], min_length=1, description="context lengths in tokens"
    )
    components: list[Annotated[str, AfterValidator(bands.check_component)]] | None = Field(
        None,
        description="interventions; default: joint,freq,scale for a model with an adapter, zero for others. Resets, "
        "which need an adapter: freq, scale, joint. kv-int8, kv-int4: quantised keys and values. pairs-zero:BAND, "
        "pairs-unrotated:BAND: rotary pairs; BAND: A-B (e.g. 0-3), short, middle, long, eighths, wavelengths. "
        f"Ablations: {kinds_help(NOT_OF_DOCUMENTS)}",
    )
    objectives: list[Literal["text", "answer"]] = Field(
        ["text"],
        min_length=1,
        description="loss over which tokens: all of a document (text), or the answer about a hidden fact (answer)",
    )
    depths: int = Field(3, ge=1, le=100, description="number of evenly spaced depths of the fact in each document")
    needles: int = Field(4, ge=1, le=10_000, description="number of facts to hide, one at a time")
    reset_to: list[Literal["init", "base"]] = Field(
        ["init"], min_length=1, description="reset to: training start (init) or checkpoint (base)"
    )
    heads: dict[str, list[str]] | None = Field(
        None,
        min_length=1,
        description="named head sets, e.g. induction=L5H1,L6H3;sinks=L0H2. The heads of a set are ablated together. "
        "With method exact, only these heads are also ablated one by one",
    )
    unit: Literal["auto", "group", "head"] = Field(
        "auto",
        description="auto: KV groups for freq, joint and quantised keys and values, else heads; head: change one "
        "query head without the others in its KV group",
    )
    method: Literal["exact", "estimate", "verify"] = Field(
        "verify",
        description="exact: evaluate every head or KV group; estimate: from gradients; verify: estimate all, evaluate "
        "those of --verify-top and --verify-random",
    )
    estimate_order: int = Field(
        2,
        ge=1,
        le=2,
        description="Taylor order of the gradient-based estimate; 2 adds the curvature of the loss",
    )
    verify_top: int = Field(
        10,
        ge=1,
        le=MAX_UNITS,
        description="number of heads or KV groups to evaluate exactly, those with the largest root "
        "mean square estimate over texts",
    )
    verify_random: int = Field(
        10,
        ge=0,
        le=MAX_UNITS,
        description="number of other heads or KV groups to evaluate exactly, drawn at random; all if there are fewer",
    )
    curve: bool = Field(
        True, description="also change the top 1, 2, 4, ... heads or KV groups together (pair bands: always all heads)"
    )
    draws: int = Field(2, ge=0, le=1000, description="number of random sets for each top set of the curve")
    memory: int = Field(
        2048, ge=0, le=2**30, description="memory for residual streams in MiB; the rest is written to disk"
    )

    @field_validator("heads", mode="before")
    @classmethod
    def _parse_head_sets(cls, value: Any) -> Any:
        """Parse the sets as written on the command line, and the heads of each set."""
        if isinstance(value, Mapping):
            return {name: head_names(heads) for name, heads in value.items()}
        if not isinstance(value, str):
            return value
        sets = [text.partition("=") for text in value.split(";") if text.strip()]
        names = [name.strip() for name, _, _ in sets]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"the set '{repeated[0]}' occurs twice. Name each set once")
        if unnamed := [heads for name, _, heads in sets if not name.strip()]:
            raise ValueError(f"the set of {unnamed[0].strip()} has no name. Write it as induction=L5H1,L6H3")
        return {name.strip(): [head.strip() for head in heads.split(",") if head.strip()] for name, _, heads in sets}

    @field_validator("heads")
    @classmethod
    def _normalize_head_sets(cls, value: dict[str, list[str]] | None) -> dict[str, list[str]] | None:
        """Write every head as L18H6, once in each set."""
        return None if value is None else {name: _normalize_heads(name, heads) for name, heads in value.items()}


def _normalize_heads(set_name: str, head_names: list[str]) -> list[str]:
    if not head_names:
        raise ValueError(f"set '{set_name}' has no heads. Write it as induction=L5H1,L6H3")
    try:
        return [format_head(*head) for head in HeadSet.parse(head_names).heads]
    except ValueError as error:
        raise ValueError(f"head set '{set_name}': {error}") from error


UNIT_COLUMNS = ["layer", "kv_group", "head"]
"""Keys of a unit within a sweep."""

UNIT_HEAD = key("head", "index16", "", "query head within the layer, from 0; -1 for a whole KV group", -1)
COMPONENT = key(
    "component",
    "label",
    "",
    "parameters that were reset: freq (log-frequencies), scale (tau, gamma), joint (both); or the intervention: "
    "kv-int8, kv-int4, pairs-zero:BAND or pairs-unrotated:BAND for a band of rotary pairs (A-B, or short, middle, long "
    "by wavelength), a user's own, or an ablation, as in --components: a mean names its source, mean:text (reference "
    "text) or mean:document (the same document)",
    None,
)
TARGET = key(
    "target",
    "label",
    "",
    "what the parameters were reset to: init or base; none for an intervention without reset",
    None,
)

METHOD = key(
    "method",
    "label",
    "",
    "exact: evaluated; estimate: first order in the head's output; second-order: with the second order [ours]",
    None,
)
LOSS_BEFORE = Column("nll_before", "value", "nats/token", "mean next-token loss of the unchanged model", 0)
LOSS_CHANGE = Column("delta_nll", "value", "nats/token", "loss after minus loss before; above 0 the loss rises")

NAMED_SET_PREFIX = "set:"
"""Prefix of `choice` for a set that the user named."""
SET_COLUMNS = (
    COMPONENT,
    TARGET,
    key("unit", "label", "", "what the set holds: group (KV groups) or head (heads)", None),
    key(
        "choice",
        "label",
        "",
        "top: the heads or KV groups of largest influence over all documents; random: as many others of the same "
        "layers, absent if a layer has too few; set:NAME: the heads of a named set [ours]",
        None,
    ),
    key("size", "index16", "units", "number of heads or KV groups changed together", 1),
    key("draw", "index16", "", "number of the random draw; 0 for the top set"),
)
TRIAL_COLUMNS = (
    DOC,
    key("fact", "label", "", "name of the fact that is hidden in the document and queried", None),
    key(
        "depth",
        "value",
        "",
        "requested position of the fact as a share of the document; it is inserted at the start of a sentence",
        0,
        1,
    ),
)
TOP1_ACCURACY = Column(
    "hits", "value", "", "share of the answer's tokens that are the unchanged model's top prediction [ours]", 0, 1
)
ANSWER_LOSS_BEFORE = Column(
    "nll_before", "value", "nats/token", "mean loss of the answer's tokens in the unchanged model", 0
)

INFLUENCE = Table(
    "influence",
    "change of a document's loss when one head or KV group is changed: its position parameters are reset, "
    "or it is ablated",
    (MODEL, LENGTH, DOC, LAYER, UNIT_HEAD, GROUP, COMPONENT, TARGET, METHOD, LOSS_BEFORE, LOSS_CHANGE),
)
INFLUENCE_SETS = Table(
    "influence_sets",
    "change of a document's loss when sets of heads or KV groups are changed together: top, random, or all",
    (MODEL, LENGTH, DOC, *SET_COLUMNS, LOSS_BEFORE, LOSS_CHANGE),
)
INFLUENCE_ANSWERS = Table(
    "influence_answers",
    "change of the loss of an answer about a hidden fact when one head or KV group is changed; the answer is the "
    "scored part of the fact, after the prompt",
    (
        MODEL,
        LENGTH,
        *TRIAL_COLUMNS,
        LAYER,
        UNIT_HEAD,
        GROUP,
        COMPONENT,
        TARGET,
        METHOD,
        TOP1_ACCURACY,
        ANSWER_LOSS_BEFORE,
        LOSS_CHANGE,
    ),
)
INFLUENCE_ANSWER_SETS = Table(
    "influence_answer_sets",
    "change of the loss of an answer when sets of heads or KV groups are changed together",
    (MODEL, LENGTH, *TRIAL_COLUMNS, *SET_COLUMNS, TOP1_ACCURACY, ANSWER_LOSS_BEFORE, LOSS_CHANGE),
)

TABLES = (INFLUENCE, INFLUENCE_SETS, INFLUENCE_ANSWERS, INFLUENCE_ANSWER_SETS)
UNIT_TABLES = {"text": INFLUENCE.name, "answer": INFLUENCE_ANSWERS.name}
"""The table of single units, by objective."""
SET_TABLES = {"text": INFLUENCE_SETS.name, "answer": INFLUENCE_ANSWER_SETS.name}


AREAS = {"text": "influence", "answer": "answer_influence"}
"""First part of the names of questions, by objective."""


def _questions(area: str, samples: str, conditions: str, brief_subject: str) -> Iterator[Question]:
    """Questions about one objective; `conditions` is the template of the context length and the loss."""
    subject = f"{{change:capital}} in {{model}}, one {{noun}} at a time ({conditions})"
    together = f"{{change:capital}} in {{model}} ({conditions})"
    effect = Question(name="", sentence="", number="+.2g", value_unit="nats/token", samples=samples)
    yield from sweep_questions(
        area,
        subject,
        brief_subject,
        number=effect.number,
        samples=samples,
        value_unit=effect.value_unit,
    )
    yield Question(
        name=f"{area}.concentration",
        sentence=f"{subject}: the top {{fraction:percent}} of {{units:,}} {{nouns}} contribute {{value}} of the total "
        "rise (Gini coefficient of the absolute changes {gini:.2f}[; {estimated:,} {nouns} were only estimated])",
        number="percent",
    )
    named = "[{group_of} ]the {top_head}"
    yield replace(
        effect,
        name=f"{area}.top_head",
        sentence=f"{subject}: the effect of {named}, {{unit}}, is {{value}}[, rank {{rank:,}} of {{units:,}} "
        "{nouns}]",
    )
    yield replace(
        effect,
        name=f"{area}.all_units",
        sentence=f"{together}: the loss changes by {{value}} with all {{size:,}} {{nouns}} changed, and by "
        "{first:+.2g} nats/token with only the top one",
    )
    yield replace(
        effect,
        name=f"{area}.named_set",
        sentence=f"{together}: changing the {{size:n heads}} of “{{choice}}” together changes the loss by {{value}}",
    )
    yield replace(
        effect,
        name=f"{area}.band",
        sentence=f"Rotary pairs of {{model}} by band, {{kind}} in one {{noun}} at a time ({conditions}): the highest "
        "effect is that of {pairs} of {unit}, {value}[. Changes with a band ablated in all heads at once, "
        "nats/token: {together:+.2g}]",
    )
    yield replace(
        effect,
        name=f"{area}.head",
        sentence=f"Influence in {{model}}, {{change}} ({conditions}): {{value}} for {{unit}}[, rank {{rank:,}} of "
        "{units:,}]",
    )
    yield replace(
        effect,
        name=f"{area}.head_band",
        sentence=f"Influence in {{model}}, largest of {{bands:n bands}}, {{change}} ({conditions}): {{value}} for "
        "{unit}",
    )


_RANK_EVIDENCE = (
    "{model}: [{group_of} ]{head_name} ({statistic_label} {score:.2f}) has rank {rank:,} of {units:,} {nouns} by "
    "influence, with {effect:+.2g} nats/token[ (interval {effect_low:+.2g} to {effect_high:+.2g})][ ({estimate})]. "
    "Its influence minus "
)

QUESTIONS = (
    *_questions("influence", "documents", "{context_length:,} tokens", "Influence, {intervention}"),
    *_questions(
        "answer_influence",
        "trials",
        "loss of the answer, up to {context_length:,} tokens",
        "Influence on answers, {intervention}",
    ),
    Question(
        name="answer_influence.answered",
        sentence="Unchanged, {model} answers {answered:,} of {n:n trials} correctly, {number:percent}",
        number="percent",
        better="higher",
    ),
    Question(
        name="answer_influence.answered_top",
        sentence="{change:capital} in {model}, one {noun} at a time, over the trials that the unchanged model answers: "
        "the highest effect is that of {unit}, {value}",
        number="+.2g",
        value_unit="nats/token",
        samples="trials",
    ),
    Question(
        name="influence.heavy_tail",
        statement="{change:capital}, one {noun} at a time: a few {nouns} account for most of the influence",
        sentence="{model}, {context_length:,} tokens: the top {fraction:percent}, {top:,} of {units:,} {nouns}, "
        "contribute {value} of the total rise",
        criterion="the top {fraction:percent} contribute more than {minimum_share:percent}",
        number="percent",
        samples="documents",
    ),
    Question(
        name="influence.tail_head",
        statement="{change:capital}, one {noun} at a time: [{group_of} ]the {top_head} is among the "
        "{fraction:percent} of {nouns} with the largest influence ({top:,} of {units:,})",
        sentence=f"{_RANK_EVIDENCE}that of the {{noun}} at rank {{top:,}} among the others is {{value}}",
        number="+.2g",
        value_unit="nats/token",
        samples="documents",
    ),
    Question(
        name="answer_influence.largest_head",
        statement="{change:capital}, one {noun} at a time: [{group_of} ]the {top_head} has the largest influence on "
        "answers",
        sentence=f"{_RANK_EVIDENCE}the largest other influence is {{value}}",
        number="+.2g",
        value_unit="nats/token",
        samples="trials",
    ),
    Question(
        name="influence.small_parts",
        statement="{change:capital}, one {noun} at a time: the largest effect of one {noun} is small compared with "
        "changing all of them",
        sentence="{model}, {context_length:,} tokens: {largest:+.2g} nats/token for one {noun}, {all_units:+.2g} for "
        "all {units:,}; a quarter of the effect of all minus the largest is {value}",
        criterion="less than a quarter",
        number="+.2g",
        value_unit="nats/token",
        samples="documents",
    ),
)

EFFECTS = {
    objective: next(question for question in QUESTIONS if question.name == f"{area}.head")
    for objective, area in AREAS.items()
}
"""The question about the effect of one unit, by objective."""
