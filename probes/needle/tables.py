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
    "strict: exact span, score at most 1; wu: as the public code of Wu et al. counts; absent: the control, a strict "
    "trial without the needle, scored where it would have been [ours]",
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
            "strict, absent: share of the scored part's tokens that the head copied at some step; wu: copies / tokens, "
            "which repeats can take above 1. A copy: the row that produced a token has its largest weight on a token "
            "of the scored part that is equal to it",
            0,
        ),
        Column("copies", "index32", "steps", "answer steps at which the head copied", 0),
        Column("mass", "value", "", "mean weight on the scored part over answer steps; 0 without a step [ours]", 0, 1),
    ),
)

TABLES = (NEEDLES, RETRIEVAL)
