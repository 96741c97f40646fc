"""Questions that the results of the probe `weights` answer."""

from headscope.results.questions import Question

QUESTIONS = (
    Question(
        name="weights.copying_heads",
        sentence="In {model}, the OV circuits of {value} of {n:n heads} copy (copying score above {threshold})",
        headline="The OV circuits of {value} of {n:n heads} copy (copying score above {threshold})",
        number=",.0f",
        level="headline",
    ),
    Question(
        name="weights.highest_copying",
        sentence="In {model}, the highest OV copying score is {value} ({unit}); the median of {n:n heads} is "
        "{median:+.2f}",
        number="+.3f",
    ),
    Question(
        name="weights.copying_agreement",
        sentence="In {model}, OV copying and the {score} have a rank correlation of {value} over {n:n heads}; of the "
        "{top:n heads} with the highest {score}, {copying} copy (median copying score {median:+.2f})",
        number="+.2f",
    ),
    Question(
        name="weights.composition",
        sentence="In {model}, [the strongest {input}-compositions are {listed:+.3f}][no {input}-composition exceeds "
        "chance: the largest is {largest_by_chance:+.3f}] (composition score minus the mean of random matrices of the "
        "same shapes, {random:.3f}). {above:,} of {n:,} pairs have a score above {chance:.3f}; by chance the largest "
        "score exceeds this value in one of 20 cases (null distribution: a random sign for each dimension that the "
        "earlier head writes to, which keeps all norms)",
        headline="Strongest {input}-composition: {largest:+.3f}; {above:,} of {n:,} pairs exceed chance",
        number="+.3f",
        level="headline",
    ),
    Question(
        name="weights.induction_inputs",
        sentence="In {model}, the {n:n heads} with the highest {score} K-compose most with: {listed:+.3f} (composition "
        "score minus the mean of random matrices of the same shapes)",
    ),
    Question(
        name="weights.positional_length",
        sentence="In {model}, the positional logits alone give a median effective length of {value} over {n:n heads}, "
        "and a median spread of {spread:number} logits over all distances",
        value_unit="tokens",
    ),
    Question(
        name="weights.positional_agreement",
        sentence="In {model}, the effective length from positional logits alone and the measured one (median "
        "{measured:number} tokens) have a rank correlation of {value} over {n:n heads}",
        number="+.2f",
    ),
    Question(
        name="weights.value_sinks",
        sentence="In {model}, {n} of {heads:n heads}[ of the {layers} layers] give the first key more than half of "
        "their weight[ {sink_rows}]; of these {n}, {value} still do once weights are multiplied by the norms of the "
        "values. The median weight of the first key changes from {key_mass:.3f} to {value_mass:.3f}, the median "
        "effective length from {key_length:number} to {value_length:number} tokens",
        number=".0f",
    ),
    Question(
        name="weights.logit",
        sentence="In {model}, {unit} has a mean logit of {value} in {n:n attributed rows}. The largest contributions "
        "at the key's token are those of {key:+.2f}; at the query's token, those of {query:+.2f}",
        number="+.2f",
    ),
    Question(
        name="weights.inputs_of_head",
        sentence="Strongest composition with earlier heads in {model}, minus random matrices of the same shapes: "
        "{partners:+.3f}",
    ),
)
