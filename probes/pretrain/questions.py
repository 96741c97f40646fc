"""Questions that the pretrain probe answers: the paper's claims about models pretrained with AdaRoPE.

Every claim but those about losses is judged for each seed; the parts of a seed are questions of their own.
"""

from headscope.results.questions import CLAIMS_TOPIC, Question

_LOSS_EVIDENCE = (
    "in contexts of {context_length:,} tokens, {parts}[; the paper has no ablation {untested:words}, so it is not part "
    "of this claim]"
)
_LOSS_CRITERION = "by more than {margin:.3f} nats/token, twice {noise_source}"

CLAIMS = (
    Question(
        name="pretrain.claim.cov",
        statement="AdaRoPE uses the rotary pairs more evenly than RoPE and partial RoPE",
        sentence="{parts}",
        criterion="its CoV is at least 5 % lower",
    ),
    Question(
        name="pretrain.claim.effective_base",
        statement="The effective base grows with depth",
        sentence="{parts}",
        criterion="the rank correlation is above 0.3",
    ),
    Question(
        name="pretrain.claim.gamma",
        statement="Gamma is largest in the first layer and between 0 and 0.2 in the other layers",
        sentence="{parts}",
        criterion="largest by at least 0.05",
    ),
    Question(
        name="pretrain.claim.lengths",
        statement="AdaRoPE has a wider range of effective lengths than RoPE, and gamma falls as the effective length "
        "rises",
        sentence="{parts}",
        criterion="at least 1.2 times as wide, and a rank correlation below -0.3",
    ),
    Question(
        name="pretrain.claim.used_frequencies",
        statement="Used frequencies have a wider spread under AdaRoPE than under RoPE and follow the learned "
        "frequencies",
        sentence="{parts}",
        criterion="at least 1.2 times as wide, and a correlation r above 0.8",
    ),
    Question(
        name="pretrain.claim.ablations",
        statement="Each tested ablation of AdaRoPE ({tested:words}) has a higher loss than AdaRoPE",
        sentence=_LOSS_EVIDENCE,
        criterion=_LOSS_CRITERION,
    ),
    Question(
        name="pretrain.claim.schemes",
        statement="AdaRoPE has a lower loss than every other position scheme",
        sentence=_LOSS_EVIDENCE,
        criterion=_LOSS_CRITERION,
    ),
)


def _part(name: str, sentence: str, number: str, samples: str = "heads") -> Question:
    return Question(name=name, sentence=sentence, number=number, samples=samples, topic=CLAIMS_TOPIC)


PARTS = (
    _part("pretrain.seed", "Seed {seed}: {parts}", "number"),
    _part(
        "pretrain.cov_difference",
        "the median CoV is {median:.3f} in {model} and {baseline_median:.3f} in {baseline}, a difference of {value}",
        "+.3f",
    ),
    _part(
        "pretrain.base_by_depth",
        "the rank correlation of the effective base with depth is {value}; the medians by layer are {by_layer:,.0f}",
        "+.2f",
        "KV groups",
    ),
    _part(
        "pretrain.first_layer_gamma",
        "the mean gamma by layer is {by_layer:+.3f}; the first layer leads by {value}",
        "+.3f",
    ),
    _part("pretrain.lowest_gamma", "the lowest later layer has a mean gamma of {value}", "+.3f"),
    _part("pretrain.highest_gamma", "the highest later layer has a mean gamma of {value}", "+.3f"),
    _part(
        "pretrain.length_range",
        "the 90th percentile of the effective length divided by the 10th is {spread:.1f} in {model} and "
        "{baseline_spread:.1f} in {baseline}, a ratio of {value}",
        ".2f",
    ),
    _part("pretrain.gamma_by_length", "the rank correlation of gamma with effective length is {value}", "+.2f"),
    _part(
        "pretrain.frequency_spread",
        "the standard deviation of the mean ln theta, weighted by usage, is {spread:.3f} in {model} and "
        "{baseline_spread:.3f} in {baseline}, a ratio of {value}",
        ".2f",
    ),
    _part(
        "pretrain.used_by_learned", "the correlation of the used with the learned mean ln theta is r = {value}", "+.2f"
    ),
    Question(
        name="pretrain.loss_gap",
        sentence="the validation loss of {model} minus that of {baseline} is {value}",
        number="+.3f",
        value_unit="nats/token",
        samples="documents",
        topic=CLAIMS_TOPIC,
    ),
)

QUESTIONS = (*CLAIMS, *PARTS)
