"""Questions that the adapt probe answers: the validation loss of a training, and the paper's claims about adapters.

Thresholds are in `results`; the criteria here state them.
"""

from headscope.results.questions import CLAIMS_TOPIC, Question

_LENGTHS_CRITERION = (
    "“longer” is a median ratio above {longer:.3f}, “unchanged” one from {shorter:.3f} to {longer:.3f}; small-ESS and "
    "large-ESS heads are the lower and the upper third of heads by effective length in {baseline}"
)
_LENGTHS_EVIDENCE = "at {context_length:,} tokens, {parts}"

QUESTIONS = (
    Question(
        name="adapt.validation_loss",
        sentence="The validation loss of {training} changes by {value} in {step:n steps}, from {start:.4f} to "
        "{last:.4f}; it is lowest at step {best_step} ({best:.4f})",
        headline="{training}: the validation loss changes by {value} in {step:n steps}",
        number="+.4f",
        value_unit="nats/token",
        samples="documents",
        level="headline",
        topic="Training",
        better="lower",
    ),
    Question(
        name="adapt.claim.loss",
        statement="AdaRoPE has a lower loss than YaRN at every position of the extended context",
        sentence="{model}: the loss is below YaRN's in {below} of {bins:n position bins}[, in {certain} of them with "
        "an interval below 0]; in the last bin the difference is {value}",
        number="+.3f",
        value_unit="nats/token",
        samples="documents",
    ),
    Question(
        name="adapt.loss_at_position",
        sentence="in the position bin that ends at {position:,}, the loss of {model} minus that of {baseline} is "
        "{value}",
        number="+.3f",
        value_unit="nats/token",
        samples="documents",
        topic=CLAIMS_TOPIC,
        better="lower",
    ),
    Question(
        name="adapt.claim.slow_pairs",
        statement="Frequencies change mostly in the low-frequency pairs",
        sentence="{model}: the slower half of the pairs accounts for [{value} of ]the squared change of the "
        "log-frequencies; the RMS change is {slow:.3f} there and {fast:.3f} in the faster half",
        criterion="more than two thirds",
        number="percent",
        samples="KV groups",
    ),
    Question(
        name="adapt.claim.depth",
        statement="Early layers move to lower frequencies, deeper layers to higher ones",
        sentence="{model}: {parts}[; the rank correlation of the change with depth is {correlation:+.2f}]",
    ),
    Question(
        name="adapt.frequency_change",
        sentence="the mean change of the log-frequency is {value} in the {layers} of the layers",
        number="+.4f",
        samples="KV groups",
        topic=CLAIMS_TOPIC,
    ),
    Question(
        name="adapt.claim.tau",
        statement="The median tau is near 1 (the paper also reports a mild right tail, which is not tested)",
        sentence="{model}: the median is {median:.3f}, at a distance of {value} from 1; the 10th and 90th percentiles "
        "are {low_tau:.3f} and {high_tau:.3f}; {near_one:percent} of heads are within {threshold} of 1[. Training "
        "starts from YaRN's temperature, tau = {yarn_tau:.3f}, and not from 1]",
        criterion="a distance below {threshold}",
        number=".3f",
        samples="heads",
    ),
    Question(
        name="adapt.claim.gamma",
        statement="gamma is mostly positive",
        sentence="{model}: the share of heads with positive gamma is {value}, and the median gamma is {median:+.4f}. "
        "Up to the reference length L_ref, gamma only rescales the logits (by (ln 2)^gamma), so its sign reflects both "
        "the temperature up to L_ref and the growth beyond it",
        criterion="more than {threshold:percent}",
        number="percent",
        samples="heads",
    ),
    Question(
        name="adapt.claim.lengths_without_factor",
        statement="YaRN without its attention factor lengthens large-ESS heads, but also changes the effective length "
        "of small-ESS heads",
        sentence=f"{_LENGTHS_EVIDENCE}; the paper's text and its caption swap this result and the next",
        criterion=_LENGTHS_CRITERION,
    ),
    Question(
        name="adapt.claim.lengths_yarn",
        statement="YaRN with its attention factor keeps small-ESS heads as they are and does not lengthen large-ESS "
        "heads",
        sentence=_LENGTHS_EVIDENCE,
        criterion=_LENGTHS_CRITERION,
    ),
    Question(
        name="adapt.claim.lengths_adarope",
        statement="AdaRoPE keeps small-ESS heads as they are and lengthens large-ESS heads",
        sentence=_LENGTHS_EVIDENCE,
        criterion=_LENGTHS_CRITERION,
    ),
    Question(
        name="adapt.length_ratio",
        sentence="the median ratio of effective lengths, {model} to {baseline}, is {value} in {heads} heads",
        number=".2f",
        is_ratio=True,
        samples="heads",
        topic=CLAIMS_TOPIC,
    ),
    Question(
        name="adapt.claim.evenness",
        statement="AdaRoPE uses the rotary pairs more evenly (lower CoV; the paper's claim is about pretraining)",
        sentence="{model}: the median CoV by model is {medians:.3f}[; the training started from {baseline}, and the "
        "ratio to it is {value}]",
        criterion="a ratio below {threshold}",
        number=".3f",
        samples="heads",
    ),
    Question(
        name="adapt.claim.base_by_depth",
        statement="The effective base grows with depth (the paper's claim is about pretraining)",
        sentence="{model}: the rank correlation with the layer is {value}; the values range from {lowest:,.0f} to "
        "{highest:,.0f}",
        criterion="above {threshold}",
        number="+.2f",
        samples="KV groups",
    ),
)
