"""The positions that a checkpoint was trained under, if its config names them.

A folder whose config.json has `headscope_positions` was trained from its first step under that scheme: under another
one its weights would give wrong numbers. "adarope" stands for the learned parameters in the same folder.
"""

from pathlib import Path

from headscope import user_input
from headscope.errors import BadInput
from headscope.model_spec import SchemeSpec
from headscope.models.checkpoint import LoadedModel
from headscope.positions.scheme_syntax import build_scheme
from headscope.positions.schemes import Scheme

POSITIONS_KEY = "headscope_positions"
"""The entry of config.json with the scheme of a checkpoint."""
PRETRAINING_KEY = "headscope_pretraining"
"""The entry of config.json with the variant and the seed of a checkpoint that `headscope pretrain` trained."""
LEARNED = "adarope"
ADAPTER_FILE = "adarope.safetensors"
"""The learned parameters in the folder of a checkpoint that was trained with AdaRoPE."""


def trained_under(checkpoint: LoadedModel) -> tuple[SchemeSpec, Scheme] | None:
    """The scheme that a checkpoint was trained under, or None if that is its family's.

    Raises BadInput for an entry that is not a scheme, Missing if the learned parameters do not exist.
    """
    text = getattr(checkpoint.module.config, POSITIONS_KEY, None)
    if text is None:
        return None
    if not isinstance(text, str):
        raise BadInput(
            f"checkpoint '{checkpoint.name}': {POSITIONS_KEY} in its config.json is {user_input.quote(text)}. It must "
            "be a position scheme"
        )
    if text == LEARNED:
        file = str(Path(checkpoint.module.name_or_path) / ADAPTER_FILE)
        spec = SchemeSpec(f"adarope:adapter={file}", "adarope", {"adapter": file})
    else:
        spec = SchemeSpec.parse(text)
    return spec, build_scheme(spec)
