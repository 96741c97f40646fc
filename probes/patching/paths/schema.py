"""Options and stored tables of path patching."""

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from headscope.errors import OptionError, OptionName
from headscope.heads import HeadSet
from headscope.prompts.token_positions import ALL_TOKENS
from headscope.runs.columns import MODEL, Column, Table, key
from headscope.study.python_options import ACCEPTS_POSITIONS
from probes.patching.schema import (
    DIRECTION,
    MAX_UNITS,
    METRIC,
    PAIR_NAME,
    PROMPTS,
    VALUES,
    PairOptions,
)

PathEnd = Literal["q", "k", "v", "logits"]
PATH_ENDS: tuple[PathEnd, ...] = get_args(PathEnd)
RECEIVER_INPUTS = PATH_ENDS[:3]
LOGITS = -1
"""Value of `receiver_layer` and `receiver_head` for a path to the logits."""
TOGETHER = -2
"""Value of `receiver_layer` and `receiver_head` for a path to all named receivers together."""
ALL_HEADS = ["all"]
ALL_POSITIONS = [ALL_TOKENS]

_Positions = Annotated[list[Annotated[str, Field(min_length=1)]], ACCEPTS_POSITIONS]


class PathsOptions(PairOptions):
    """Path patching: change what one head receives from one earlier head, or the logits from one head."""

    senders: list[str] = Field(
        ALL_HEADS, min_length=1, description="heads that paths start from, such as L18H6; or all"
    )
    receivers: list[str] = Field(
        ALL_HEADS, min_length=1, description="heads in later layers that paths lead to, such as L23H3; or all"
    )
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
        description="patch the named receivers of a sender together, those in later layers than it; for method exact",
    )
    sender_positions: _Positions = Field(
        ALL_POSITIONS,
        min_length=1,
        description="positions at which the sender changes: all together; each: every position separately; NAME: a "
        "named span, last, a token such as 3 or -1, or a range such as -4:; for method exact",
    )
    receiver_positions: _Positions = Field(
        ALL_POSITIONS,
        min_length=1,
        description="positions at which q, k or v of the receiver follow, as in --sender-positions; for method exact",
    )
    method: Literal["exact", "estimate", "verify"] = Field(
        "verify",
        description="exact: patch every path; estimate: all paths from gradients; verify: estimate all, patch those of "
        "--verify-top and --verify-random",
    )
    verify_top: int = Field(
        10,
        ge=1,
        le=MAX_UNITS,
        description="for verify: number of paths to patch exactly, those with the largest root mean square estimate "
        "over pairs, per model, set, direction and input (q, k, v, logits)",
    )
    verify_random: int = Field(
        5, ge=0, le=MAX_UNITS, description="for verify: number of other paths to patch exactly, drawn at random"
    )

    @field_validator("senders", "receivers")
    @classmethod
    def _check_heads(cls, value: list[str]) -> list[str]:
        return value if value == ALL_HEADS else HeadSet.parse(value).identifiers

    @model_validator(mode="after")
    def _check_gradient(self) -> Self:
        if self.metric == "kl" and "noising" in self.directions and self.method != "exact":
            raise ValueError(
                "kl cannot be estimated for noising: its gradient is 0 in the clean run. Use method exact, or another "
                "metric"
            )
        return self

    @model_validator(mode="after")
    def _check_exact(self) -> Self:
        for name, is_set in (
            ("mlps", self.mlps == "recomputed"),
            ("together", self.together),
            ("sender_positions", self.sender_positions != ALL_POSITIONS),
            ("receiver_positions", self.receiver_positions != ALL_POSITIONS),
        ):
            if is_set and self.method != "exact":
                raise OptionError(
                    "{option} is for method exact, not {value}: estimates are of direct paths to one head, at all "
                    "positions. Use method exact, or remove {option}",
                    option=OptionName(name),
                    value=self.method,
                )
        if self.together and (self.receivers == ALL_HEADS or self.through == ["logits"]):
            raise OptionError("{together} is for named receivers. Name {receivers} and q, k or v, or remove {together}")
        return self

    @model_validator(mode="after")
    def _refuse_unused_receivers(self) -> Self:
        for name in ("receivers", "receiver_positions"):
            if self.through == ["logits"] and name in self.model_fields_set:
                raise OptionError(
                    "{option} has no effect here: paths lead to the logits only. Remove {option}",
                    option=OptionName(name),
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
        absent=ALL_TOKENS,
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
    absent=False,
)

PATHS = Table(
    "paths",
    "metric of one prompt of a pair when one head receives from one earlier head what it sends in the other run",
    (MODEL, PROMPTS, PAIR_NAME, *PATH_KEYS, *PLACE_KEYS, DIRECTION, METRIC, NORMS, MLPS_RECOMPUTED, *VALUES),
)
PATH_ESTIMATES = Table(
    "path_estimates",
    "estimates of all paths from gradients: mean over the pairs that count (is_counted of the table paths)",
    (
        MODEL,
        PROMPTS,
        *PATH_KEYS,
        DIRECTION,
        METRIC,
        NORMS,
        Column("effect", "value", "", "estimate of the effect of the table `paths`, of first order in the sender"),
        Column("pairs", "count", "pairs", "number of pairs that were averaged", 1),
    ),
    mean_over_cells="pairs",
)
TABLES = (PATHS, PATH_ESTIMATES)
