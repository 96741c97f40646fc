"""Edits of heads compose: every stage, in every order, in contexts, replays and generation, equals eager attention."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import families
from support.eager_edits import EagerEdit
from support.edit_cases import LENGTH, RECORD_TOLERANCE, Case, case_of, recorded, replayed
from support.refusals import refuses
from torch import Tensor

from headscope.attention.edits import TokenSet
from headscope.attention.record import AttentionRecord
from headscope.errors import BadInput
from headscope.forward.prefix_cache import FrozenPrefix
from headscope.interventions import kinds
from headscope.interventions.edits import Edit, Run, edit, edited
from headscope.interventions.replay import Replay
from headscope.positions.model import Model

PREFIX, STEPS = 12, 4
FAMILIES = [*families.SPECS, "gemma2", "gpt_oss", "gpt2"]

SINGLE_EDITS = [
    EagerEdit("zero", 1, (0,)),
    EagerEdit("zero", 0, (0, 1, 2, 3)),
    EagerEdit("zero", 2, (3,), tokens=(3, 7, 20)),
    EagerEdit("scale", 1, (2,), factor=-1.5),
    EagerEdit("mean", 2, (1,)),
    EagerEdit("patch", 1, (1, 3)),
    EagerEdit("patch", 2, (0,), tokens=(5, 6)),
    EagerEdit("constant", 3, (2,)),
    EagerEdit("scale", 1, (0,), "q", factor=0.5),
    EagerEdit("zero", 1, (1,), "q"),
    EagerEdit("patch", 1, (2,), "q"),
    EagerEdit("patch", 2, (0,), "k"),
    EagerEdit("patch", 2, (0, 1), "k"),
    EagerEdit("patch", 2, (1,), "v", tokens=(2, 9)),
    EagerEdit("zero", 3, (0, 1, 2, 3), "v", tokens=(4,)),
    EagerEdit("scale", 0, (3,), "k", factor=2.0),
    EagerEdit("uniform", 1, (2,), "logits"),
    EagerEdit("uniform", 1, (0, 1, 2, 3), "logits", tokens=(10, 11)),
    EagerEdit("steer", 1, (0,), "logits", span=(3, 4, 5), factor=0.01),
    EagerEdit("steer", 2, (0, 1), "logits", tokens=(8, 23), span=(0, 9), factor=0.2),
    EagerEdit("suppress", 2, (1,), "logits", span=(2, 3, 4)),
    EagerEdit("suppress", 0, (0, 1), "logits", span=(*range(12),)),
    EagerEdit("streaming", 1, (3,), "logits", sink=2, recent=4),
    EagerEdit("top", 2, (2,), "logits", keys=3),
    EagerEdit("top", 0, (0, 1, 2, 3), "logits", keys=1),
]
COMPOSITIONS = [
    [EagerEdit("zero", 1, (0,)), EagerEdit("steer", 1, (0,), "logits", span=(3, 4), factor=0.05)],
    [
        EagerEdit("steer", 1, (1,), "logits", span=(3, 4), factor=0.05),
        EagerEdit("steer", 1, (1,), "logits", span=(4, 5, 6), factor=0.3),
    ],
    [
        EagerEdit("top", 2, (2,), "logits", keys=4),
        EagerEdit("steer", 2, (2,), "logits", span=(1, 2), factor=0.01),
    ],
    [
        EagerEdit("top", 2, (2,), "logits", keys=5),
        EagerEdit("streaming", 2, (2,), "logits", sink=1, recent=6),
    ],
    [EagerEdit("patch", 1, (2,), "q"), EagerEdit("patch", 1, (2,), "k")],
    [
        EagerEdit("zero", 0, (0, 1, 2, 3)),
        EagerEdit("streaming", 1, (0, 1, 2, 3), "logits", sink=2, recent=4),
    ],
    [
        EagerEdit("scale", 2, (1,), factor=2.0, tokens=(1, 2)),
        EagerEdit("zero", 2, (1,), tokens=(3, 4)),
    ],
    [
        EagerEdit("patch", 1, (1,), "k"),
        EagerEdit("steer", 1, (1,), "logits", span=(7, 8), factor=0.1),
        EagerEdit("scale", 1, (1,), factor=0.3),
    ],
    [
        EagerEdit("suppress", 2, (0,), "logits", span=(1, 2)),
        EagerEdit("suppress", 2, (0,), "logits", span=(5,)),
        EagerEdit("uniform", 2, (0,), "logits"),
    ],
    [
        EagerEdit("top", 1, (3,), "logits", keys=6),
        EagerEdit("steer", 1, (3,), "logits", span=(0,), factor=0.1),
        EagerEdit("streaming", 1, (3,), "logits", sink=3, recent=5),
    ],
    [
        EagerEdit("patch", 0, (0,), "v", tokens=(3,)),
        EagerEdit("zero", 2, (2,)),
        EagerEdit("uniform", 3, (1,), "logits", tokens=(20, 21, 22, 23)),
    ],
    [
        EagerEdit("scale", 1, (0,), "q", factor=0.2),
        EagerEdit("suppress", 1, (0,), "logits", span=(0, 1)),
        EagerEdit("constant", 1, (0,), tokens=(23,)),
    ],
]
LATE_EDITS = [
    [EagerEdit("zero", 1, (0,), tokens=(*range(PREFIX, LENGTH),))],
    [EagerEdit("patch", 2, (1,), "v", tokens=(14,))],
    [EagerEdit("steer", 1, (0,), "logits", tokens=(*range(PREFIX, LENGTH),), span=(3, 4), factor=0.05)],
    [EagerEdit("top", 2, (2,), "logits", tokens=(*range(PREFIX, LENGTH),), keys=3)],
    [
        EagerEdit("scale", 0, (1,), "q", tokens=(20,), factor=0.1),
        EagerEdit("zero", 3, (1,), tokens=(23,)),
    ],
]
GENERATION_EDITS = [
    [EagerEdit("suppress", 2, (1,), "logits", span=(2, 3, 4))],
    [
        EagerEdit("steer", 1, (0,), "logits", span=(3, 4), factor=0.05),
        EagerEdit("scale", 2, (1,), factor=0.5),
    ],
    [EagerEdit("zero", 1, (0,), tokens=(LENGTH - 1,))],
    [
        EagerEdit("streaming", 1, (3,), "logits", sink=2, recent=4),
        EagerEdit("top", 2, (2,), "logits", keys=3),
    ],
    [EagerEdit("scale", 1, (1,), "k", tokens=(5, 6), factor=0.1)],
    [
        EagerEdit("scale", 0, (1,), "k", tokens=(19, 20, 21), factor=0.1),
        EagerEdit("scale", 2, (0,), "v", tokens=(22,), factor=-2.0),
    ],
    [
        EagerEdit("steer", 2, (1,), "logits", span=(20, 21), factor=0.05),
        EagerEdit("suppress", 0, (2,), "logits", span=(21, 22)),
    ],
    [EagerEdit("constant", 2, (0,))],
    [EagerEdit("patch", 1, (2,))],
]


@pytest.fixture(params=FAMILIES)
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(request.param)


def within(model: Model, groups: Sequence[Run], compute: Callable[[], Tensor]) -> Tensor:
    """What `compute` returns inside nested contexts, one for each group of edits."""
    if not groups:
        return compute()
    with edited(model, groups[0]):
        return within(model, groups[1:], compute)


def test_a_single_edit_equals_eager_attention_in_a_context_and_in_a_batch_of_runs(case: Case) -> None:
    runs = [case.run([one]) for one in SINGLE_EDITS]
    batch = replayed(recorded(case.model, case.ids), runs)
    for one, run, together in zip(SINGLE_EDITS, runs, batch, strict=True):
        expected, _ = case.eager([one])
        case.assert_close(within(case.model, [run], case.logits), expected)
        case.assert_close(together, expected[:-1])


@pytest.mark.exhaustive(sample=6)
def test_edits_compose_whatever_the_order_and_nesting(case: Case) -> None:
    runs = [case.run(edits) for edits in COMPOSITIONS]
    for edits, run in zip(COMPOSITIONS, runs, strict=True):
        expected, _ = case.eager(edits)
        for order in itertools.permutations(run):
            case.assert_close(within(case.model, [[one] for one in order], case.logits), expected)
            case.assert_close(within(case.model, [order], case.logits), expected)
    for edits, together in zip(COMPOSITIONS, replayed(recorded(case.model, case.ids), runs), strict=True):
        case.assert_close(together, case.eager(edits)[0][:-1])


@pytest.mark.exhaustive(sample=6)
def test_listeners_get_the_weights_and_outputs_that_heads_use(case: Case) -> None:
    for edits in [*([one] for one in SINGLE_EDITS), *COMPOSITIONS]:
        records: dict[int, AttentionRecord] = {}
        with edited(case.model, case.run(edits)) as layers:
            layers.listen(lambda record: records.__setitem__(record.layer, record))  # noqa: B023
            case.logits()
        _, expected = case.eager(edits)
        for layer, record in records.items():
            weights = record.weights(range(LENGTH)).double()
            assert float((weights - expected["w", layer]).abs().max()) <= RECORD_TOLERANCE
            case.assert_close(record.z.double(), expected["z", layer], RECORD_TOLERANCE)
            case.assert_close(record.q.double(), expected["q", layer], RECORD_TOLERANCE)


def test_runs_of_a_text_recorded_inside_a_context_have_its_edits_too(case: Case) -> None:
    for edits in (COMPOSITIONS[0], COMPOSITIONS[3], COMPOSITIONS[7][::2]):
        outer, inner = edits
        with edited(case.model, case.run([outer])):
            (logits,) = replayed(recorded(case.model, case.ids), [case.run([inner])])
        case.assert_close(logits, case.eager(edits)[0][:-1])


def test_runs_after_a_shared_prefix_equal_eager_attention(case: Case) -> None:
    replay = Replay(case.model, case.model.schedule, case.ids[None], 1e9, PREFIX + 1)  # type: ignore[arg-type]
    with replay.capturing(), torch.no_grad():
        replay.use_prefix(FrozenPrefix(case.model, case.ids[None, :PREFIX]))
        replay.record_streams()
    for edits, logits in zip(LATE_EDITS, replayed(replay, [case.run(edits) for edits in LATE_EDITS]), strict=True):
        case.assert_close(logits, case.eager(edits)[0][PREFIX:-1])


def generate(case: Case, use_cache: bool) -> tuple[Tensor, Tensor]:
    """The text with `STEPS` greedy tokens, and the logits [STEPS, vocabulary] that gave them."""
    text, rows, cache = case.ids, [], None
    for step in range(STEPS):
        new = text if not use_cache or step == 0 else text[-1:]
        with torch.no_grad():
            output = case.model.module(new[None], past_key_values=cache, use_cache=use_cache)
        cache = output.past_key_values if use_cache else None
        rows.append(output.logits[0, -1].double())
        text = torch.cat([text, rows[-1].argmax()[None]])
    return text, torch.stack(rows)


@pytest.mark.exhaustive(sample=6)
def test_generation_with_a_cache_equals_recomputation_and_eager_attention(case: Case) -> None:
    for edits in GENERATION_EDITS:
        with edited(case.model, case.run(edits)):
            text, cached = generate(case, use_cache=True)
        expected = torch.stack([case.eager(edits, text[: LENGTH + step])[0][-1] for step in range(STEPS)])
        case.assert_close(cached, expected)


def test_the_last_token_stays_that_of_the_prompt_while_tokens_are_generated() -> None:
    case = case_of("llama-gqa")
    last = Edit(kinds.Zero(), ((1, 0),), ("z",), TokenSet((-1,)))
    with edited(case.model, [last]):
        text, cached = generate(case, use_cache=True)
    at_prompt = [EagerEdit("zero", 1, (0,), tokens=(LENGTH - 1,))]
    expected = torch.stack([case.eager(at_prompt, text[: LENGTH + step])[0][-1] for step in range(STEPS)])
    case.assert_close(cached, expected)


def test_an_edit_of_a_left_padded_batch_acts_on_the_tokens_of_every_sequence() -> None:
    case = case_of("llama-gqa")
    short, padding = case.ids[: LENGTH - 5], 5
    ids = torch.stack([case.ids, torch.cat([torch.zeros(padding, dtype=torch.long), short])])
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    for positions in ((3,), (-1,), (-2, -1)):
        with edited(case.model, [Edit(kinds.Zero(), ((1, 0),), ("z",), TokenSet(positions))]), torch.no_grad():
            together = case.model.module(ids, attention_mask=mask, use_cache=False).logits.double()
        for row, text in zip(together, (case.ids, short), strict=True):
            tokens = tuple(position % len(text) for position in positions)
            expected, _ = case.eager([EagerEdit("zero", 1, (0,), tokens=tokens)], text)
            case.assert_close(row[-len(text) :], expected)


def test_estimates_equal_small_exact_changes(case: Case) -> None:
    replay, size = recorded(case.model, case.ids), 1e-3
    runs = [
        [Edit(kinds.Scale(1 + size), ((layer, head),), (target,))]
        for target in ("z", "q", "k", "v")
        for layer in range(case.model.geometry.layers)
        for head in range(4)
    ]

    def metric(logits: Tensor, tokens: Tensor) -> Tensor:
        return (logits[:, 5] - logits[:, 9]).sum()

    with replay.capturing():
        estimates = replay.estimate(runs, [metric], lambda products: float(products.sum()))
    unchanged, *changed = (
        float(metric(logits, case.ids)) for logits in replayed(recorded(case.model, case.ids), [[], *runs])
    )
    exact = torch.tensor(changed, dtype=torch.float64) - unchanged
    torch.testing.assert_close(
        torch.tensor(estimates, dtype=torch.float64), exact, rtol=0.02, atol=0.02 * exact.abs().max()
    )


CONFLICTS = {
    "zero and scale of one z": ([EagerEdit("zero", 1, (0,))], [EagerEdit("scale", 1, (0, 1), factor=2.0)]),
    "two edits of one q": ([EagerEdit("zero", 1, (0,), "q")], [EagerEdit("scale", 1, (0,), "q", factor=2.0)]),
    "the same edit twice": ([EagerEdit("zero", 1, (0,))], [EagerEdit("zero", 1, (0,))]),
    "one token": (
        [EagerEdit("zero", 1, (0,), tokens=(*range(5),))],
        [EagerEdit("scale", 1, (0,), factor=2.0, tokens=(*range(4, 9),))],
    ),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_two_edits_of_one_tensor_head_and_token_are_refused_with_both_names(name: str) -> None:
    case, (outer, inner) = case_of("llama-gqa"), CONFLICTS[name]
    labels = [one.label for one in case.run([*outer, *inner])]
    with refuses(BadInput, *labels):
        within(case.model, [case.run(outer), case.run(inner)], case.logits)


def test_edits_of_other_tokens_or_tensors_of_one_head_do_not_conflict() -> None:
    case = case_of("llama-gqa")
    for edits in (
        [EagerEdit("zero", 1, (0,), tokens=(0, 1)), EagerEdit("scale", 1, (0,), factor=2.0, tokens=(2, 3))],
        [EagerEdit("zero", 1, (0,), "q"), EagerEdit("scale", 1, (0,), "k", factor=2.0)],
    ):
        case.assert_close(within(case.model, [case.run([one]) for one in edits], case.logits), case.eager(edits)[0])


def test_a_kind_of_another_stage_is_refused() -> None:
    model = case_of("llama-gqa").model
    with refuses(BadInput, "z"):
        edit(model, kinds.Steer(TokenSet((1,)), 0.1), "L0H0", targets=("z",))
    with refuses(BadInput, "logits"):
        edit(model, kinds.Zero(), "L0H0", targets=("logits",))


@pytest.mark.parametrize("kind", [kinds.DocumentMean(), kinds.Noise(0.1)])
def test_kinds_of_a_whole_text_are_refused_after_a_cache(kind: Any) -> None:
    case = case_of("llama-gqa")
    with refuses(BadInput, kind.name), edited(case.model, [Edit(kind, ((1, 0),), ("z",))]):
        generate(case, use_cache=True)


def test_a_text_that_was_recorded_outside_a_context_is_refused_inside() -> None:
    case = case_of("llama-gqa")
    replay = recorded(case.model, case.ids)
    with refuses(BadInput), edited(case.model, case.run([SINGLE_EDITS[0]])):
        replayed(replay, [[]])


def test_contexts_that_end_in_another_order_leave_the_edits_of_those_that_are_open() -> None:
    case = case_of("llama-gqa")
    first, second = (edited(case.model, case.run([one])) for one in (SINGLE_EDITS[0], SINGLE_EDITS[3]))
    plain = case.logits()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    case.assert_close(case.logits(), case.eager([SINGLE_EDITS[3]])[0])
    second.__exit__(None, None, None)
    assert torch.equal(case.logits(), plain)


def test_heads_without_an_edit_keep_their_outputs_bit_for_bit() -> None:
    case, records = case_of("llama-gqa"), dict[bool, AttentionRecord]()
    for is_edited in (False, True):
        run = case.run([replace(SINGLE_EDITS[0], layer=0), replace(SINGLE_EDITS[18], layer=0, heads=(1,))])
        with edited(case.model, run if is_edited else []) as layers:
            layers.listen(lambda record: records.__setitem__(is_edited, record), [0])  # noqa: B023
            case.logits()
    assert torch.equal(records[True].z[2:], records[False].z[2:])
    assert not torch.equal(records[True].z[:2], records[False].z[:2])
