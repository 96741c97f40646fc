"""Options, stored tables and questions of path patching."""

from typing import Any, Literal, Self, get_args

from pydantic import Field, model_validator

from headscope.base.model_identity import WEIGHTS_OPTION, AcceptedWeights
from headscope.prompts.token_positions import ALL_TOKENS
from headscope.results.answers import answer_questions
from headscope.results.effects.results import sweep_questions
from headscope.results.questions import Question
from headscope.runs.columns import ANSWER_METRIC, MODEL, Column, Table, key
from headscope.study.answer_options import HEADS_HELP, HeadNames, PositionNames
from headscope.study.option_rules import Needs
from probes.patching.declaration import DIRECTION, MAX_UNITS, PAIR_NAME, PROMPTS, VALUES, Method, PairOptions

PathEnd = Literal["q", "k", "v", "logits"]
PATH_ENDS: tuple[PathEnd, ...] = get_args(PathEnd)
RECEIVER_INPUTS = PATH_ENDS[:3]
LOGITS = -1
"""Value of `receiver_layer` and `receiver_head` for a path to the logits."""
TOGETHER = -2
"""Value of `receiver_layer` and `receiver_head` for a path to all named receivers together."""
ALL_HEADS = ["all"]
ALL_POSITIONS = [ALL_TOKENS]


EXACT_ONLY = Needs(
    "mlps=recomputed together sender_positions!=all receiver_positions!=all",
    "method=exact|auto",
    "estimates are of direct paths to one head, at all positions",
)


class PathsOptions(PairOptions):
    """Path patching: change what one head receives from one earlier head, or the logits from one head."""

    option_rules = (
        EXACT_ONLY,
        Needs("together receivers receiver_positions", "through!=logits", "paths lead to the logits only"),
        Needs("together", "receivers!=all"),
    )

    senders: HeadNames = Field(
        ALL_HEADS, min_length=1, description=f"heads that paths start from, such as L18H6; all; {HEADS_HELP}"
    )
    receivers: HeadNames = Field(
        ALL_HEADS,
        min_length=1,
        description="heads in later layers that paths lead to, such as L23H3; all; or file: and run:, as in --senders",
    )
    weights: AcceptedWeights = Field("same", description=WEIGHTS_OPTION)
    through: list[PathEnd] = Field(
        [*PATH_ENDS],
        min_length=1,
        description="what of the receiver changes: q, k, v; logits: the direct path from a sender to the logits, "
        "whatever --receivers names",
    )
    norms: Literal["frozen", "recomputed"] = Field(
        "frozen",
        description="norms on a path (before the receiver's layer or the logits): frozen at their scale in the "
        "unpatched run, so that paths add up; recomputed, as in TransformerLens",
    )
    mlps: Literal["frozen", "recomputed"] = Field(
        "frozen",
        description="MLPs between a sender and a receiver: frozen at their outputs in the unpatched run, so that a "
        "path is direct; recomputed, as in Wang et al. 2022 (with recomputed norms; for method exact)",
    )
    together: bool = Field(
        False,
        description="patch the named receivers of a sender together, those in later layers than it",
    )
    sender_positions: PositionNames = Field(
        ALL_POSITIONS,
        min_length=1,
        description="positions at which the sender changes: all together; each: every position separately; NAME: a "
        "named span, last, a token such as 3 or -1, or a range such as -4:",
    )
    receiver_positions: PositionNames = Field(
        ALL_POSITIONS,
        min_length=1,
        description="positions at which q, k or v of the receiver follow, as in --sender-positions",
    )
    method: Method = Field(
        "auto",
        description="exact: patch every path; estimate: all paths from gradients; verify: estimate all, patch those of "
        "--verify-top and --verify-random; auto: exact where only exact is possible, or if that takes less than a "
        "minute on two cores, else verify",
    )
    verify_top: int = Field(
        10,
        ge=1,
        le=MAX_UNITS,
        description="number of paths to patch exactly, those whose estimates change the metric most "
        "(root mean square over pairs), per model, set, direction and input (q, k, v, logits)",
    )
    verify_random: int = Field(
        5, ge=0, le=MAX_UNITS, description="number of other paths to patch exactly, drawn at random"
    )

    @property
    def needs_exact(self) -> bool:
        return super().needs_exact or self._has_no_gradient or bool(EXACT_ONLY.set_options(self))

    @property
    def _has_no_gradient(self) -> bool:
        """Whether the metric's gradient is 0 in a run that is patched."""
        return self.metric == "kl" and "noising" in self.directions

    @model_validator(mode="after")
    def _check_gradient(self) -> Self:
        if self._has_no_gradient and self.method in ("estimate", "verify"):
            raise ValueError(
                "kl cannot be estimated for noising: its gradient is 0 in the clean run. Use method exact, or another "
                "metric"
            )
        return self


_HEAD = "-1 for the logits, -2 for the named receivers together"
PATH_KEYS = (
    key("sender_layer", "index16", "", "decoder layer of the sender, from 0"),
    key("sender_head", "index16", "", "query head of the sender, from 0"),
    key("receiver_layer", "index16", "", f"decoder layer of the receiver, from 0; {_HEAD}", TOGETHER),
    key("receiver_head", "index16", "", f"query head of the receiver, from 0; {_HEAD}", TOGETHER),
    key("through", "label", "", "changed input of the receiver: q, k or v; logits: path to the logits", None),
)
PLACE_KEYS = tuple(
    Column(
        f"{end}_positions",
        "label",
        "",
        f"positions at which {meaning}: all, a named span, a token or a range by number",
        key=True,
    )
    for end, meaning in (("sender", "the sender changes"), ("receiver", "the input of the receiver follows"))
)
NORMS = key("norms", "label", "", "norms on the path: frozen or recomputed", None)
MLPS_RECOMPUTED = Column(
    "mlps_recomputed",
    "flag",
    "",
    "whether MLPs between sender and receiver were recomputed (Wang et al. 2022), not frozen",
    key=True,
)

PATHS = Table(
    "paths",
    "metric of one prompt of a pair when one head receives from one earlier head what it sends in the other run",
    (MODEL, PROMPTS, PAIR_NAME, *PATH_KEYS, *PLACE_KEYS, DIRECTION, ANSWER_METRIC, NORMS, MLPS_RECOMPUTED, *VALUES),
)
PATH_ESTIMATES = Table(
    "path_estimates",
    "estimates of all paths from gradients: means over the pairs that count (is_counted of the table paths), whose "
    "ratio is the effect",
    (
        MODEL,
        PROMPTS,
        *PATH_KEYS,
        DIRECTION,
        ANSWER_METRIC,
        NORMS,
        Column("change", "value", "logits, nats", "estimated change of the metric, of first order in the sender"),
        Column(
            "difference",
            "value",
            "logits, nats",
            "change of the metric if it became that of the run that the path comes from",
        ),
        Column("pairs", "count", "pairs", "number of pairs that were averaged", 1),
    ),
    mean_over_cells="pairs",
)
TABLES = (PATHS, PATH_ESTIMATES)


_SWEEP = "path patching, {direction}[, norms {other_norms}][, MLPs {other_mlps}], {prompts}"
_SUBJECT = f"{_SWEEP}, in {{model}}"
_EFFECT: dict[str, Any] = {"number": "+.2f", "samples": "pairs"}

EFFECT = Question(
    name="paths.between_heads",
    sentence=f"{_SUBJECT}: the strongest path between heads is {{path}}, {{value}}",
    **_EFFECT,
)
"""The effect of one path."""

QUESTIONS = (
    *answer_questions("paths", "pairs", has_corrupted=True),
    Question(
        name="paths.pair",
        sentence=f"{_SWEEP}, pair {{pair}}, in {{model}}: the strongest of the patched paths is {{path}}, {{value}}",
        headline=f"{_SWEEP}, pair {{pair}}: {{path}} {{value}}",
        level="row",
        **_EFFECT,
    ),
    *sweep_questions("paths", _SUBJECT, _SWEEP, unit="{path}", **_EFFECT),
    EFFECT,
    Question(
        name="paths.head",
        sentence=f"{_SUBJECT}: the strongest path {{end}} this head is {{path}}, {{value}}",
        **_EFFECT,
    ),
)
