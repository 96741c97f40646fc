"""The positions that a checkpoint was trained under, where its config tells of them.

A folder whose config.json has `headscope_positions` was trained from its first step under that scheme, so that without
it the weights would be measured wrongly. "adarope" stands for the learned parameters beside the weights.
"""

from pathlib import Path

from headscope import user_input
from headscope.errors import BadInput
from headscope.models.checkpoint import LoadedModel
from headscope.positions.scheme_syntax import parse
from headscope.positions.schemes import Adapted, Scheme

KEY = "headscope_positions"
"""The entry of a checkpoint's config.json."""
LEARNED = "adarope"
FILE = "adarope.safetensors"
"""Where a folder trained with AdaRoPE keeps its parameters."""


def trained_under(checkpoint: LoadedModel) -> tuple[str, Scheme] | None:
    """The text and the rule of a checkpoint's own scheme; None where it is its family's.

    Raises BadInput for an entry that names no scheme, Missing where the learned parameters are not there.
    """
    told = getattr(checkpoint.module.config, KEY, None)
    if told is None:
        return None
    if not isinstance(told, str):
        raise BadInput(
            f"'{checkpoint.name}': {KEY} in its config.json is {user_input.quote(told)}, not a position scheme"
        )
    if told == LEARNED:
        file = str(Path(checkpoint.module.name_or_path) / FILE)
        return f"adarope:adapter={file}", Adapted(file)
    return told, parse(told)
