"""Every type in the uses of a model: ablation, patching and influence, in batches of runs, and generation.

The numbers are compared with the family's own eager attention: `layout_checks` edits its heads, and generated tokens
have the logits of one eager pass over the text without a cache and without padding.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

import headscope as hs
from headscope.attention import backend
from headscope.errors import BadInput
from headscope.forward.backbone import attention_layer_indices, decoder_layers
from headscope.interventions.edits import Edit, Run
from headscope.interventions.kinds import Scale
from headscope.interventions.replay import Replay
from headscope.positions.model import Model

from . import layout_checks
from .checks import Verdict, relative
from .eager import Truth, eager
from .layout_checks import Errors, Measure

COPIES = 2
TOKENS = (COPIES, 10)
"""Lengths of the texts of runs. As many tokens as copies show axes that are taken for each other."""
PROMPT, PADDING, GENERATED = 8, 3, 5


def check_uses(make: Callable[[], PreTrainedModel]) -> Verdict:
    """The verdict on a model type in every use."""
    return layout_checks.check_measures(make, USES)


def _resumed_batches(model: Model, ids: Tensor, truth: Truth) -> Errors:
    """Two runs with different edits from every layer with attention, and all of them, against full passes."""
    return {f"resumed batch of {length} tokens": _resumption_error(model, ids[:, :length]) for length in TOKENS}


@torch.no_grad()
def _resumption_error(model: Model, ids: Tensor) -> float:
    replay, errors = Replay(model, model.schedule, ids, memory_bytes=1e9), []
    runs: list[Run] = []
    expected: list[Tensor] = []
    with replay.capturing():
        replay.record_streams()
        for layer, heads in enumerate(model.geometry.layer_heads):
            for factors in 2 * torch.rand(COPIES, heads, generator=torch.Generator().manual_seed(0)):

                def scale(z: Tensor, call: backend.AttentionCall, factors: Tensor = factors) -> Tensor:
                    return z * factors[:, None, None]

                with backend.editing_output(model.attention_modules[layer], scale):
                    expected.append(model.module(ids, use_cache=False).logits[0, :-1].float())
                numbers = enumerate(factors.tolist())
                runs.append([Edit(Scale(factor), ((layer, head),), ("z",)) for head, factor in numbers])
            errors.append(relative(_logits_of(replay, runs[-COPIES:]), torch.stack(expected[-COPIES:])))
        errors.append(relative(_logits_of(replay, runs), torch.stack(expected)))
    return max(errors)


def _logits_of(replay: Replay, runs: Sequence[Run]) -> Tensor:
    """The logits [runs, L - 1, V] of runs in ascending order of their first layers, in batches."""
    logits: list[Tensor] = []
    replay.evaluate(runs, lambda of_run: len(logits.append(of_run) or logits))  # type: ignore[func-returns-value]
    return torch.stack(logits)


def _ablation(model: Model, ids: Tensor, truth: Truth) -> Errors:
    """Zero ablation of heads of two layers together, in a context."""
    ids, units = ids[:, : layout_checks.TEXT_LENGTH], layout_checks._sample_units(model)
    heads = [f"L{model.geometry.layer_numbers[unit.layer]}H{unit.head}" for unit in (units[0], units[-1])]
    with hs.ablated(model, heads, "zero"), torch.no_grad():
        measured = model.module(ids, use_cache=False).logits[0].float()

    def zero(layer: int) -> Callable[[Tensor], Tensor]:
        removed = [unit.head for unit in (units[0], units[-1]) if unit.layer == layer]
        return lambda z: z * (~torch.isin(torch.arange(len(z)), torch.tensor(removed)))[:, None, None]

    edits = {unit.layer: zero(unit.layer) for unit in (units[0], units[-1])}
    with torch.no_grad():
        return {"ablated logits": relative(measured, layout_checks._eager_logits(model, ids, edits))}


def _generation(model: Model, ids: Tensor, truth: Truth) -> Errors:
    """Greedy generation with a cache; each token's logits against one pass over the text."""
    return {"generated logits": _generation_error(model, ids[:, :PROMPT])}


def _padded_generation(model: Model, ids: Tensor, truth: Truth) -> Errors:
    """The same in a batch with a longer text, which pads this one on the left."""
    return {"generated logits with padding": _generation_error(model, ids[:, PADDING : PADDING + PROMPT], ids)}


def _generation_error(model: Model, prompt: Tensor, longer: Tensor | None = None) -> float:
    pad = getattr(model.module.config.get_text_config(), "pad_token_id", None) or 0
    batch, mask = prompt, torch.ones_like(prompt)
    if longer is not None:
        padding = torch.full((1, PADDING), pad)
        batch = torch.cat((longer[:, : PADDING + PROMPT], torch.cat((padding, prompt), 1)))
        mask = torch.ones_like(batch)
        mask[1, :PADDING] = 0
    options = {"max_new_tokens": GENERATED, "min_new_tokens": GENERATED, "do_sample": False, "pad_token_id": pad}
    results = {"output_logits": True, "return_dict_in_generate": True, "use_cache": True}
    try:
        with hs.capturing(model):
            output = model.module.generate(batch, attention_mask=mask, **options, **results)
    except hs.errors.HeadscopeError:
        raise
    except Exception as error:
        _own_generation_works(model, batch, mask, options, error)
        raise
    logits = torch.stack(output.logits)[:, -1].float()
    tokens = output.sequences[-1:, batch.shape[1] : -1]
    expected = eager(model.module, torch.cat((prompt, tokens), 1)).logits[0, PROMPT - 1 :]
    error = relative(logits, expected)
    if error > layout_checks.MAX_ERROR and None in attention_layer_indices(model, decoder_layers(model)):
        # The recurrent layers of Nemotron-H round otherwise step by step than in one pass.
        own = model.module.generate(batch, attention_mask=mask, **options, **results)
        error = relative(logits, torch.stack(own.logits)[:, -1].float())
    return error


def _own_generation_works(model: Model, batch: Tensor, mask: Tensor, options: dict, error: Exception) -> None:
    """Raise BadInput if the family's own generation fails as well: then headscope is not the cause."""
    try:
        model.module.generate(batch, attention_mask=mask, **options)
    except Exception as own:
        raise BadInput(f"generation: its own generation fails, too ({type(own).__name__})") from error


USES: dict[str, Measure] = {
    "resumed batches": _resumed_batches,
    "ablation": _ablation,
    "patching": layout_checks._patching,
    "influence": layout_checks._influence,
    "generation": _generation,
    "generation with padding": _padded_generation,
}
