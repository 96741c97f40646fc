"""Glossary of the probe `measure`."""

from headscope.rendering.blocks import Term

GLOSSARY = (
    Term(
        "Head",
        "A layer of a language model has several attention heads. For each token, a head gives every earlier token a "
        "weight; the weights of one token, αᵢⱼ, sum to one. Heads are numbered from 0 within their layer. Query heads "
        "that share one key head form a KV group and share its rotary frequencies.",
    ),
    Term(
        "Effective length, ESS₂",
        "The effective number of tokens that a head attends to. All weight on one token gives 1; equal weight on n "
        "tokens gives n. The value of a head is the exponential of the mean logarithm over the query tokens in the "
        "last octave of visible keys, that is, in the last four bins that the head's layer fills; every token counts "
        "once. If the length of the context or window is the edge of a bin, such as 512, 1,024 or 2,048, these tokens "
        "see more than half of it.",
        "ESS₂(i) = 1 / Σⱼ αᵢⱼ²",
        ("attention",),
    ),
    Term(
        "Growth exponent",
        "The exponent with which the effective length grows with the number n of visible tokens. The expected value is "
        "about 0 for a head that retrieves one token wherever it is, and about 1 for a head that aggregates the whole "
        "context.",
        tables=("attention",),
    ),
    Term(
        "Rotary pair and its usage",
        "Rotary position embedding rotates each pair of query and key dimensions by an angle, θ × distance. Fast pairs "
        "(large θ) distinguish nearby tokens; slow pairs hardly change with distance. The usage of a pair is the mean "
        "absolute value of its contribution to the logit, the number that the softmax turns into a weight.",
        tables=("pairs", "distance"),
    ),
    Term(
        "Coefficient of variation, CoV",
        "Standard deviation of usage over the pairs of a head, divided by the mean. 0 means that all pairs are used "
        "equally; larger values mean that a few pairs dominate.",
        tables=("pairs",),
    ),
    Term(
        "Effective base",
        "The base of the plain rotary embedding whose frequencies have the same mean logarithm. A larger base means "
        "slower pairs.",
        tables=("scales",),
    ),
    Term(
        "Position schemes",
        "base is the checkpoint as it was trained. YaRN slows the slow pairs to reach longer contexts, and multiplies "
        "queries and keys by a constant, its attention factor; “YaRN without factor” omits it. AdaRoPE learns the "
        "frequencies of each KV group, and for each head a temperature τ and an exponent γ with which its logits grow "
        "with the context.",
    ),
    Term(
        "95 % confidence intervals",
        "A range that contains the true mean in about 95 % of repeated samples of documents (or trials), by Student's "
        "t. One or two documents give no interval.",
    ),
)
