"""Questions that the results of the spans probe answer."""

from headscope.results.questions import Question

QUESTIONS = (
    Question(
        name="spans.missing",
        sentence="In {model}, no row of {query} sees a key of {key}: no text has both, or the layers hide it. Show "
        "another pair with --query and --key",
        level="warning",
    ),
    Question(
        name="spans.incomplete",
        sentence="Texts of {model} that lack the pair {query} to {key}: {number:.0f} of {n}; heads left out, because "
        "their layers hide the pair in another text: {left_out} of {heads}",
        number=".0f",
        level="warning",
    ),
    Question(
        name="spans.top_head",
        sentence="From {query} to {key}, {unit} in {model} has the largest attention mass: {value}; that of uniform "
        "weights is {chance:percent1}, that of the median head {median:percent1}[. {key} is 1 of "
        "{spans} named spans; --key {other} shows another]",
        headline="From {query} to {key}, {unit} has most mass: {value} (chance {chance:percent1})",
        answer="The largest attention mass of a head is {values}; that of uniform weights is {chance:percent1}",
        number="percent",
        samples="texts",
        level="headline",
    ),
    Question(
        name="spans.groups",
        sentence="In {model}, the mass from {query} to {key} differs between {first} and {second} in {number:.0f} of "
        "{n:n heads} (false discovery rate 5 %; {prompts} prompts)",
        headline="{number:.0f} of {n:n heads} differ between {first} and {second}",
        number=".0f",
        level="headline",
    ),
    Question(
        name="spans.separating_head",
        sentence="In {model}, {unit} separates {second} from {first} best: AUROC {value}",
        number=".2f",
        samples="prompts",
    ),
    Question(
        name="spans.held_out",
        sentence="In {model}, the {chosen} heads that one half of the prompts chose separate {second} from {first} in "
        "the other half with AUROC {number:.2f} (mean of {splits} splits; lowest {lowest:.2f}, highest {highest:.2f}; "
        "{n} prompts)",
        headline="Held out, chosen heads separate {second} from {first} with AUROC {number:.2f}",
        number=".2f",
        level="headline",
    ),
    Question(
        name="spans.steering_failing",
        sentence="{model}, steered to {key}: {number:.0f} of {n:n prompts} are left out of the mean {label} "
        "({label_unit}), because without steering {reason}: {names:+.2f}[ and {more} more]. Use other prompts, or "
        "--keep-failing",
        number=".0f",
        level="warning",
    ),
    Question(
        name="spans.steering_uncounted",
        sentence="{model}, steered to {key}: no prompt counts[ in {every}], so there is no mean {label} ({label_unit})"
        "[. Without steering {reason} in {failing} of {n:n prompts}: {names:+.2f}][ and {more} more]. Use other "
        "prompts, or --keep-failing",
        level="warning",
    ),
    Question(
        name="spans.steered_prompt",
        sentence="Steered to {key}, {heads} of {model} change the mean log-probability of the continuation of prompt "
        "{prompt} by {value} nats per token, from {plain:.2f} to {steered:.2f}[; its lead over the wrong one goes from "
        "{plain_lead:+.2f} to {steered_lead:+.2f} nats][. The prompt is left out of {left_out}]",
        headline="{prompt}, steered to {key}: {plain:.2f} to {steered:.2f} nats/token[, lead {plain_lead:+.2f} to "
        "{steered_lead:+.2f}][; left out of {left_out}]",
        number="+.2f",
        level="row",
    ),
    Question(
        name="spans.steered",
        sentence="Steered to {key}, {heads} of {model} change the mean log-probability of the continuation from "
        "{plain:.2f} to {steered:.2f} nats per token: by {value} (factor {alpha:g})[. Left out: {left_out:n prompts}]",
        headline="Steered to {key}, log-probability changes by {value} nats/token[; {left_out} left out]",
        number="+.2f",
        samples="prompts",
        level="headline",
    ),
    Question(
        name="spans.steered_share",
        sentence="Steered to {key}, {model} prefers the continuation to the wrong one in {steered:percent} of "
        "{n:n prompts} instead of {plain:percent}, a difference of {value} (factor {alpha:g})",
        headline="Steered to {key}, the continuation leads in {steered:percent} of {n:n prompts}, not {plain:percent}",
        number="points",
        value_unit="percentage points",
        samples="prompts",
        level="headline",
    ),
    Question(
        name="spans.steered_choice",
        sentence="Steered to {key}, {model} changes the lead of the continuation over the wrong one by {value} nats, "
        "from {plain:+.2f} to {steered:+.2f} (factor {alpha:g})[. Left out: {left_out:n prompts}]",
        headline="Steered to {key}, lead changes by {value} nats[; {left_out} left out]",
        number="+.2f",
        samples="prompts",
        level="headline",
    ),
    Question(
        name="spans.lookback",
        sentence="Among the heads of {model}, {unit} has the largest lookback ratio: {value}; the median head has "
        "{median:.2f}",
        number=".2f",
        samples="texts",
    ),
    Question(
        name="spans.head",
        sentence="From {query} to {key}, its attention mass in {model} is {value}; chance is {chance:percent1}",
        number="percent",
        samples="texts",
    ),
)
