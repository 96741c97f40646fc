"""What the needle probe stores: trials, and what each head copied in each."""

from headscope.runs.columns import DOC, GROUP, HEAD, LAYER, LENGTH, MODEL, Column, Table, key

NEEDLE_KEYS = (
    key("needle", "label", "", "name of the needle, the fact that was hidden", None),
    LENGTH,
    key(
        "depth",
        "value",
        "",
        "where the needle was to begin, as a share of the haystack's tokens; it begins at the last sentence start "
        "that lies there or before, and span_start tells where that was",
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
    "strict: exact span, score at most 1; indirect: the same, of a needle that is asked for in other words [ours]; wu: "
    "as the public code of Wu et al. counts; absent: the control, a strict trial without the needle, scored where it "
    "would have been [ours]",
    None,
)

NEEDLES = Table(
    "needles",
    "Needle-in-a-Haystack trials: what each model answered",
    (
        MODEL,
        MODE,
        *NEEDLE_KEYS,
        Column("prompt_tokens", "index32", "tokens", "length of the whole prompt", 1),
        Column("span_start", "index32", "tokens", "first token of the scored part of the needle in the prompt", 0),
        Column("span_end", "index32", "tokens", "end of the scored part (exclusive)", 0),
        Column("answer", "text", "", "what the model said, greedily, before the end token or a line break"),
        Column(
            "recall", "value", "", "ROUGE-1 recall of the scored part's words in the answer, no stemming [ours]", 0, 1
        ),
        Column("success", "flag", "", "whether recall is above 0.5"),
        Column("steps", "index32", "tokens", "answer steps that were scored", 0),
    ),
)

RETRIEVAL = Table(
    "retrieval",
    "how much of the needle each head copied in each trial, successful or not",
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
            "/ tokens, which repeats can take above 1. A copy: the row that produced a token has its largest weight on "
            "a token of the scored part that is equal to it",
            0,
        ),
        Column("copies", "index32", "steps", "answer steps at which the head copied", 0),
        Column("mass", "value", "", "mean weight on the scored part over answer steps; 0 without a step [ours]", 0, 1),
    ),
)

NEEDLE_TOKENS = Table(
    "needle_tokens",
    "what each model read around each needle; controls are left out",
    (
        MODEL,
        MODE,
        *NEEDLE_KEYS,
        Column("before", "text", "", "the last words of the haystack before the needle"),
        Column("given", "text", "", "the needle's opening, which is not scored"),
        Column("scored", "text", "", "the rest of the needle, which is"),
        Column("after", "text", "", "the first words of the haystack after the needle"),
        Column("asked", "text", "", "what follows the haystack: the question, and how the answer begins"),
    ),
)

ANSWER_STEP = key("step", "index16", "steps", "answer step that was scored, from 0")

NEEDLE_STEPS = Table(
    "needle_steps",
    "each answer as it was written, token by token; controls are left out",
    (
        MODEL,
        MODE,
        *NEEDLE_KEYS,
        ANSWER_STEP,
        Column(
            "piece", "text", "", "what the token adds to the answer; a character that is split stands on its last token"
        ),
    ),
)

NEEDLE_COPIES = Table(
    "needle_copies",
    "which heads copied a token of the needle at which step of the answer; controls are left out",
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

NEEDLE_ATTRIBUTION = Table(
    "needle_attribution",
    "what each head added directly to the logits of the answered tokens in each trial, successful or not",
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
            "mean over answered tokens of what the head added through its weight on the needle's tokens, opening "
            "included; absent: on the tokens that stand where the needle would; less the mean over the vocabulary, "
            "norms frozen at the scale that they had",
        ),
        Column("rest", "value", "logits", "the same through all other tokens"),
    ),
)

ABLATION_KEYS = (
    key("ablation", "label", "", "zero: the heads say nothing; mean: they say their mean over the haystack", None),
    key("size", "index16", "heads", "heads that were silenced together", 1),
    key(
        "draw",
        "index16",
        "",
        "0: the top heads by score, over the successful trials of the other half of the needles; from 1: random heads, "
        "as many in each layer, none of the top ones where others are left [ours]",
    ),
)

NEEDLE_ABLATION = Table(
    "needle_ablation",
    "what each model answered with some of its heads silenced",
    (
        MODEL,
        MODE,
        *ABLATION_KEYS,
        *NEEDLE_KEYS,
        Column("answer", "text", "", "what the model said, greedily, before the end token or a line break"),
        Column("recall", "value", "", "ROUGE-1 recall of the scored part's words in the answer", 0, 1),
        Column("success", "flag", "", "whether recall is above 0.5"),
    ),
)

NEEDLE_ABLATED_HEADS = Table(
    "needle_ablated_heads",
    "which heads were silenced together",
    (
        MODEL,
        *ABLATION_KEYS,
        key("half", "index16", "", "half of the needles that was asked for: 0 the first, third ...; 1 the others"),
        LAYER,
        HEAD,
        GROUP,
        Column("score", "value", "", "what the head scored over the other half of the needles"),
    ),
)

TABLES = (
    NEEDLES,
    RETRIEVAL,
    NEEDLE_TOKENS,
    NEEDLE_STEPS,
    NEEDLE_COPIES,
    NEEDLE_ATTRIBUTION,
    NEEDLE_ABLATION,
    NEEDLE_ABLATED_HEADS,
)
