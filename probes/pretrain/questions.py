"""Questions that the pretrain probe answers: the paper's claims about models pretrained with AdaRoPE.

Every claim is judged by the means of its parts over seeds.
"""

from dataclasses import replace

from headscope.results.questions import CLAIMS_TOPIC, Question

REPEATED = Question(
    name="pretrain.repeated",
    topic="Models",
    level="warning",
    sentence="{model} and {chosen}, from two folders, are the variant {variant} with seed {training_seed}; the claims "
    "are about that of {chosen} alone",
)
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


def _part(name: str, subject: str, number: str) -> Question:
    """A statistic of one training, or of one of each of two schemes, and its mean over seeds."""
    return Question(
        name=f"pretrain.{name}",
        sentence=f"{subject} is {{value}} ({{by_seed:{number}}})",
        number=number,
        samples="seeds",
        topic=CLAIMS_TOPIC,
    )


PARTS = (
    _part("cov_difference", "the difference of AdaRoPE's median CoV from that of {other}, relative to it,", "+percent"),
    replace(_part("base_by_depth", "the rank correlation of the effective base with depth", "+.2f"), limits=(-1, 1)),
    _part("first_layer_gamma", "the lead of the first layer in mean gamma", "+.3f"),
    _part("lowest_gamma", "the mean gamma of the lowest later layer", "+.3f"),
    _part("highest_gamma", "the mean gamma of the highest later layer", "+.3f"),
    replace(
        _part(
            "length_range",
            "the 90th percentile of the effective length divided by the 10th, as a ratio of AdaRoPE to {other},",
            ".2f",
        ),
        is_ratio=True,
    ),
    replace(_part("gamma_by_length", "the rank correlation of gamma with effective length", "+.2f"), limits=(-1, 1)),
    replace(
        _part(
            "frequency_spread",
            "the standard deviation of the mean ln theta, weighted by usage, as a ratio of AdaRoPE to {other},",
            ".2f",
        ),
        is_ratio=True,
    ),
    replace(
        _part("used_by_learned", "the correlation r of the used with the learned mean ln theta", "+.2f"), limits=(-1, 1)
    ),
    replace(
        _part("loss_gap", "the validation loss of {other} minus that of AdaRoPE", "+.3f"),
        value_unit="nats/token",
    ),
)

QUESTIONS = (REPEATED, *CLAIMS, *PARTS)
