"""Questions of the needle probe: success, shares of heads, agreement of their scores, and their ablation."""

from headscope.results.questions import Question
from probes.needle.scores import RETRIEVAL_THRESHOLD

MAX_SUPPORTED_SIZE = 16
"""Largest number of ablated heads at which the claim of Wu et al. is judged [ours]."""

QUESTIONS = (
    Question(
        name="retrieval.success",
        sentence="The success rate of {model}[ with {variant}] is {value}",
        headline="Needle retrieved[ with {variant}]: {value}",
        answer="Success rate[ with {variant}]: {values}",
        number="percent",
        samples="trials",
        level="headline",
        better="higher",
    ),
    Question(
        name="retrieval.no_success",
        sentence="{model} answers none of {n:n trials}[ with {variant}], so its heads have no retrieval score. See "
        "its answers in the table 'needles'",
        level="warning",
    ),
    Question(
        name="retrieval.control_success",
        sentence="{model} also answers {number:.0f} of {n:n prompts} without the needle: it knows or guesses these "
        "facts. Its success does not show retrieval. Use other needles",
        level="warning",
    ),
    Question(
        name="retrieval.control_score",
        sentence="Without the needle (control), the largest retrieval score of a head of {model} is {number:.3f}",
    ),
    *(
        Question(
            name=f"retrieval.{name}",
            sentence=f"In {{model}}, {{number:percent1}} of {{n:n heads}} have a retrieval score {meaning}[ with "
            "{variant}][, {position} the {published_low:percent} to {published_high:percent} that Wu et al. 2024 "
            "report]",
            number="percent1",
        )
        for name, meaning in (("share_above", f"above {RETRIEVAL_THRESHOLD}"), ("share_zero", "of 0"))
    ),
    Question(
        name="retrieval.kv_groups",
        sentence="In {model}, {number:.0f} of {n:n KV groups} contain a head with a retrieval score above "
        f"{RETRIEVAL_THRESHOLD}",
        number=".0f",
    ),
    Question(
        name="retrieval.haystack_agreement",
        sentence="The retrieval scores of {model} in haystacks {haystack} and {other_haystack} have a rank correlation "
        "of {value} and {overlap:percent} of their top {top} heads in common",
        number=".2f",
        samples="heads",
    ),
    Question(
        name="retrieval.model_agreement",
        sentence="The retrieval scores of {first} and {second} have a rank correlation of {value} and "
        "{overlap:percent} of their top {top} heads in common",
        number=".2f",
        samples="heads",
    ),
    Question(
        name="retrieval.detector_agreement",
        sentence="In {model}, {first} and {second} have a rank correlation of {value} and {overlap:percent} of their "
        "top {top} heads in common",
        number=".2f",
        samples="heads",
    ),
    Question(
        name="retrieval.ablated_success",
        sentence="Success rate of {model}[ with {variant}] with its top {size:n heads} ablated "
        "({change}): {value}; without ablation {unchanged:percent}[; {control}]",
        number="percent",
        samples="trials",
    ),
    Question(
        name="retrieval.random_ablated_success",
        sentence="Success rate of {model}[ with {variant}] with {size:n heads} of the same layers ablated at random "
        "({change}): {value}",
        number="percent",
        samples="trials",
    ),
    Question(
        name="retrieval.ablation_drop",
        sentence="Success rate of {model}[ with {variant}] with {size:n heads} ablated at random minus that with its "
        "top heads ablated ({change}): {value}",
        headline="Random minus top {size} ablated[, {variant}]: {value}",
        number="points",
        value_unit="percentage points",
        samples="trials",
        level="headline",
    ),
    Question(
        name="retrieval.ablation_claim",
        statement="{change:capital} of the top retrieval heads reduces the retrieval of {needles} more "
        "than ablation of random heads of the same layers (Wu et al. 2024)",
        sentence="{model}: {unchanged:percent} of trials succeed without ablation, {top:percent} with the top "
        "{size:n heads} ablated, and {random:percent} with as many ablated at random (mean of {draws:n draws}), a "
        "difference of {value}",
        criterion=f"at the largest tested number of heads up to {MAX_SUPPORTED_SIZE} with a control, the whole "
        "interval of the difference, over trials and draws of random heads, is above 0. Each half of the needles is "
        "tested with heads ranked on the other half",
        number="points",
        value_unit="percentage points",
        samples="trials",
    ),
    Question(
        name="retrieval.no_score",
        sentence="{model} answers no trial, so its heads have no retrieval score",
    ),
    Question(
        name="retrieval.head_score",
        sentence="In {model}, it copies {value} of the needle[; its score without the needle is {control:.3f}]",
        number="percent",
        samples="trials",
    ),
    Question(
        name="retrieval.head_attribution",
        sentence="In {model}, its direct logit attribution to an answer token is {value} through the needle[ and "
        "{rest:+.2f} through all other tokens]",
        number="+.2f",
        value_unit="logits",
        samples="trials",
    ),
)
