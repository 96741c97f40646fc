"""Options and tables of the needle probe: trials, retrieval scores, answers, attribution and ablation."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from headscope.base.ablation_names import NOT_IN_GENERATION, ablation_in_generation, kinds_help
from headscope.base.model_identity import WEIGHTS_OPTION, AcceptedWeights
from headscope.errors import OptionError
from headscope.prompts.needle_grid import even_depths
from headscope.runs.columns import DOC, GROUP, HEAD, LAYER, LENGTH, MODEL, Column, Table, key
from headscope.study.config import Lengths, Options, TextSource
from headscope.study.option_rules import Excludes, Needs

MAX_DEPTHS = 1000


class NeedleOptions(Options):
    """Needle-in-a-Haystack: context lengths x depths x needles x seeds; every head is scored on every answer."""

    option_rules = (
        Excludes("kind=indirect|both", "file", "{kind} selects built-in needles"),
        Excludes("mode=wu", "kind=indirect|both attribution", "mode wu supports only copies of literal needles"),
        Needs("heads", "ablate_top", "the sizes of the sets to ablate, e.g. 5,10"),
        Excludes("rank_by", "heads", "scores of a file rank its heads"),
        Needs("ablate_top", "heads mode=strict", "mode wu ranks no heads"),
        Needs("ablation draws weights", "ablate_top", "the sizes of the sets to ablate, e.g. 5,10"),
        Needs("rank_by=attribution", "attribution", "heads are ranked by what is measured"),
    )

    lengths: Lengths = Field([512, 1024, 1536, 2048], description="context lengths in tokens")
    steps: int | None = Field(
        None, ge=1, le=100, description="number of context lengths, evenly spaced up to a single length (default 2048)"
    )
    depths: int | list[float] = Field(
        5,
        description="number of depths, evenly spaced from 0 to 1, or a list of depths; a single integer such as 1 is a "
        "number of depths, 1.0 is a depth",
    )
    needles: int = Field(6, ge=1, le=10_000, description="number of needles per kind")
    kind: Literal["literal", "indirect", "both"] = Field(
        "literal", description="literal: the question uses the needle's words; indirect: it paraphrases them; or both"
    )
    file: str | None = Field(
        None,
        description="your own needles as JSON lines: name, question, opening, fact; and cue for paraphrased questions; "
        "or Retrieval_Head's needles.jsonl",
    )
    haystacks: list[TextSource] = Field(
        [],
        description="a text source for each needle, in order, in which only that needle is hidden; default: the "
        "documents of the study hide every needle",
    )
    seeds: int = Field(
        1,
        ge=1,
        le=10_000,
        description="number of haystacks, which are documents of the text source; not the random seed",
    )
    mode: Literal["strict", "wu"] = Field(
        "strict",
        description="rule for counting copied tokens: strict (top key inside the needle), or as in Wu et al.'s code",
    )
    template: Literal["prefix", "plain", "chat"] = Field(
        "prefix",
        description="end of the prompt: the needle's opening (prefix), nothing (plain), or the model's chat template; "
        "plain in mode wu: prompt, scored part and end of the answer as in Wu et al.'s code",
    )
    attribution: bool = Field(
        False,
        description="also measure direct logit attribution to the answer, through the needle and through other tokens",
    )
    ablate_top: list[Annotated[int, Field(le=1_000_000)]] = Field(
        [],
        description="set sizes of the ablation curve: ablate the top N heads together, with N random heads as control, "
        "e.g. 1,2,4,8",
    )
    rank_by: Literal["copies", "attribution"] = Field(
        "copies", description="score that ranks the heads to ablate: copies or attribution through the needle"
    )
    heads: str | None = Field(
        None,
        description="file of heads or head scores, such as a published list: ablate its top heads instead of heads "
        "ranked here",
    )
    weights: AcceptedWeights = Field("same", description=WEIGHTS_OPTION)
    ablation: list[Annotated[str, AfterValidator(ablation_in_generation)]] = Field(
        ["zero"],
        description=f"ablation of heads; uniform as Wu et al. mask heads. {kinds_help(NOT_IN_GENERATION)}",
    )
    draws: int = Field(
        5,
        ge=1,
        le=1000,
        description="random head sets per size, each with as many other heads per layer as the top set",
    )

    @model_validator(mode="after")
    def _check_grid(self) -> "NeedleOptions":
        if self.depths == []:
            raise ValueError("no depth. Give at least one")
        if self.steps and len(self.lengths) > 1 and "lengths" in self.model_fields_set:
            raise OptionError(
                "{steps} {count} needs a single context length, not {given}. Change {lengths}, or remove {steps}",
                count=self.steps,
                given=",".join(map(str, self.lengths)),
            )
        if isinstance(self.depths, int) and not 1 <= self.depths <= MAX_DEPTHS:
            raise ValueError(
                f"depths {self.depths} is a number of depths. Use 1 to {MAX_DEPTHS}, or a list of depths from 0 to 1"
            )
        if wrong := [depth for depth in self.grid_depths if not 0 <= depth <= 1]:
            raise ValueError(f"depth {wrong[0]:g} is out of range. Use 0 (start of the haystack) to 1 (end)")
        if len({f"{depth:.4f}" for depth in self.grid_depths}) < len(self.grid_depths):
            raise ValueError("two depths are closer than 0.0001. Remove one")
        return self

    @model_validator(mode="after")
    def _check_combinations(self) -> "NeedleOptions":
        if self.ablate_top and min(self.ablate_top) < 1:
            raise OptionError("{ablate_top} {size} ablates no head. Use at least 1", size=min(self.ablate_top))
        if self.ablate_top and self.heads is None and self.needles < 2:
            raise OptionError("{ablate_top} ranks heads on half of the needles. Use at least 2 needles")
        if not self.ablation:
            raise ValueError("ablation has no value. Use zero, mean:text or uniform")
        return self

    @property
    def grid_lengths(self) -> list[int]:
        """Context lengths in tokens, ascending."""
        if self.steps is None:
            return self.lengths
        return sorted({max(1, round(self.lengths[-1] * n / self.steps)) for n in range(1, self.steps + 1)})

    @property
    def grid_depths(self) -> list[float]:
        """Depths, ascending; a single depth is in the middle."""
        if isinstance(self.depths, list):
            return sorted(set(self.depths))
        return even_depths(self.depths)


NEEDLE_KEYS = (
    key("needle", "label", "", "name of the needle, the hidden fact", None),
    LENGTH,
    key(
        "depth",
        "value",
        "",
        "requested position of the needle as a share of the haystack's tokens; it is inserted at the last sentence "
        "start at or before that position; achieved_depth is the actual depth",
        0,
        1,
    ),
    DOC,
    key("seed", "index32", "", "seed of the study plus the number of the haystack in its order"),
)
MODE = key(
    "mode",
    "label",
    "",
    "strict: exact span, score at most 1; indirect: strict, with a paraphrased question [ours]; wu: "
    "counted as in Wu et al.'s code; absent: control, a strict trial without the needle, scored at its position [ours]",
    None,
)

NEEDLES = Table(
    "needles",
    "Needle-in-a-Haystack trials: the answer of each model",
    (
        MODEL,
        MODE,
        *NEEDLE_KEYS,
        Column("prompt_tokens", "index32", "tokens", "length of the whole prompt", 1),
        Column(
            "achieved_depth",
            "value",
            "",
            "actual depth of the needle: haystack tokens before it as a share of all; -1 in runs that did not store it",
            -1,
            1,
        ),
        Column("span_start", "index32", "tokens", "first token of the scored part of the needle in the prompt", 0),
        Column("span_end", "index32", "tokens", "end of the scored part (exclusive)", 0),
        Column("answer", "text", "", "the model's greedy answer up to the end token or a line break"),
        Column(
            "recall", "value", "", "ROUGE-1 recall of the scored part's words in the answer, no stemming [ours]", 0, 1
        ),
        Column("success", "flag", "", "whether recall is above 0.5"),
        Column("steps", "index32", "tokens", "answer steps that were scored", 0),
    ),
)

RETRIEVAL = Table(
    "retrieval",
    "retrieval score of each head in each trial, successful or not",
    (
        MODEL,
        MODE,
        LAYER,
        HEAD,
        GROUP,
        *NEEDLE_KEYS,
        Column(
            "score",
            "value",
            "",
            "strict, indirect, absent: share of the scored part's tokens that the head copied at some step; wu: copies "
            "/ tokens, above 1 with repeats. A copy: the largest weight of the query that outputs a token is on an "
            "equal token of the scored part",
            0,
        ),
        Column("copies", "index32", "steps", "answer steps at which the head copied", 0),
        Column("mass", "value", "", "mean weight on the scored part over answer steps; 0 without a step [ours]", 0, 1),
    ),
)

NEEDLE_TOKENS = Table(
    "needle_tokens",
    "the prompt around each needle, without controls",
    (
        MODEL,
        MODE,
        *NEEDLE_KEYS,
        Column("before", "text", "", "the haystack just before the needle"),
        Column("cue", "text", "", "the opening of the needle, which is not scored"),
        Column("scored", "text", "", "the rest of the needle, which is scored"),
        Column("after", "text", "", "the haystack just after the needle"),
        Column("question", "text", "", "the end of the prompt: the question and the beginning of the answer"),
    ),
)

ANSWER_STEP = key("step", "index16", "steps", "scored answer step, from 0")

NEEDLE_STEPS = Table(
    "needle_steps",
    "each answer token by token, without controls",
    (
        MODEL,
        MODE,
        *NEEDLE_KEYS,
        ANSWER_STEP,
        Column(
            "text", "text", "", "text that the token adds to the answer; a split character belongs to its last token"
        ),
    ),
)

NEEDLE_COPIES = Table(
    "needle_copies",
    "heads that copied a token of the needle, by answer step, without controls",
    (
        MODEL,
        MODE,
        *NEEDLE_KEYS,
        ANSWER_STEP,
        LAYER,
        HEAD,
        GROUP,
        Column("key", "index32", "tokens", "position of the copied token in the prompt", 0),
    ),
)

NEEDLE_KEY_WEIGHTS = Table(
    "needle_keys",
    "what each head attends to at each answer step, without controls: the keys, other than the first token, that hold "
    "at least 15 % of the weight of the query that outputs the token",
    (
        MODEL,
        MODE,
        *NEEDLE_KEYS,
        ANSWER_STEP,
        LAYER,
        HEAD,
        GROUP,
        key("key", "index32", "tokens", "key position j in the prompt; later positions are tokens of the answer", 1),
        Column("weight", "value", "", "attention weight of that key, rounded to 1/128", 0, 1),
    ),
)

NEEDLE_PROMPTS = Table(
    "needle_prompts",
    "the tokens of each prompt, without controls",
    (
        MODEL,
        MODE,
        *NEEDLE_KEYS,
        Column("tokens", "text", "", "what each token adds to the text, as a JSON list"),
    ),
)

NEEDLE_ATTRIBUTION = Table(
    "needle_attribution",
    "direct logit attribution of each head to the answer in each trial, successful or not",
    (
        MODEL,
        MODE,
        LAYER,
        HEAD,
        GROUP,
        *NEEDLE_KEYS,
        Column(
            "through",
            "value",
            "logits",
            "mean over answer tokens of the attribution through the needle's tokens, cue included (absent: through the "
            "tokens at its position), minus the mean over the vocabulary, with frozen normalisation scales",
        ),
        Column("rest", "value", "logits", "attribution through all other tokens"),
    ),
)

ABLATION_KEYS = (
    key(
        "ablation",
        "label",
        "",
        "ablation, as in --ablation; mean:text: outputs set to their mean over a reference text",
        None,
    ),
    key("size", "index16", "heads", "number of heads ablated together", 1),
    key(
        "draw",
        "index16",
        "",
        "0: the top heads by score over the successful trials of the other half of the needles, or in the given file; "
        "from 1: random heads, as many others in each layer; absent if a layer has too few [ours]",
    ),
)

NEEDLE_ABLATION = Table(
    "needle_ablation",
    "the answer of each model with some of its heads ablated",
    (
        MODEL,
        MODE,
        *ABLATION_KEYS,
        *NEEDLE_KEYS,
        Column("answer", "text", "", "the model's greedy answer up to the end token or a line break"),
        Column("recall", "value", "", "ROUGE-1 recall of the scored part's words in the answer", 0, 1),
        Column("success", "flag", "", "whether recall is above 0.5"),
    ),
)

NEEDLE_ABLATED_HEADS = Table(
    "needle_ablated_heads",
    "heads that were ablated together",
    (
        MODEL,
        *ABLATION_KEYS,
        key(
            "half",
            "index16",
            "",
            "half of the needles that was tested: 0 for needles 1, 3, ...; 1 for needles 2, 4, ...",
        ),
        LAYER,
        HEAD,
        GROUP,
        Column(
            "score",
            "value",
            "",
            "score of the head over the other half of the needles, or in the given file; 0 for a head that the file "
            "does not name",
        ),
    ),
)

TABLES = (
    NEEDLES,
    RETRIEVAL,
    NEEDLE_TOKENS,
    NEEDLE_STEPS,
    NEEDLE_COPIES,
    NEEDLE_KEY_WEIGHTS,
    NEEDLE_PROMPTS,
    NEEDLE_ATTRIBUTION,
    NEEDLE_ABLATION,
    NEEDLE_ABLATED_HEADS,
)
