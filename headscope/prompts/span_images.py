"""Images of chat prompts: the tokens and inputs that the processor of a vision-language model makes of them."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from headscope.errors import BadInput, ResourceMissing, first_line
from headscope.prompts.spans import SpanPrompt

TOKEN_INPUTS = ("input_ids", "attention_mask")
"""What a processor makes of the text alone."""


def process_images(processor: Any, prompt: SpanPrompt, text: str) -> tuple[list[int], Mapping[str, Any]]:
    """Token ids of a rendered chat with its images, and the model's other inputs, such as pixel values.

    Raises BadInput for a file that is no image and for a text whose images the processor does not accept,
    ResourceMissing without the package Pillow.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ResourceMissing(
            "prompts with images need the package pillow, which is not installed. Run pip install 'headscope[vision]'"
        ) from error
    pictures = []
    for image in prompt.images:
        try:
            pictures.append(Image.open(image.path).convert("RGB"))
        except OSError as error:
            raise BadInput(f"{prompt.location}: '{image.path}' is not an image. Use a PNG or JPEG file") from error
    try:
        inputs = dict(processor(text=[text], images=pictures, return_tensors="pt", add_special_tokens=False))
    except Exception as error:  # processors of other libraries may raise any error
        raise BadInput(
            f"{prompt.location}: the model's processor refuses the images ({first_line(error)}). Change their number "
            "or their place"
        ) from error
    ids = inputs["input_ids"][0].tolist()
    return ids, {name: value for name, value in inputs.items() if name not in TOKEN_INPUTS}


def align_images(ids: Sequence[int], expanded: Sequence[int], image_token: int, location: str) -> list[int]:
    """For every token of `expanded` its place in `ids`, or -1 for the tokens that stand for an image.

    In `ids` one `image_token` stands for each image. Raises BadInput if the other tokens differ, or if the processor
    divides each of several images into rows, because it is then unknown where an image ends.
    """
    places = [place for place, token in enumerate(ids) if token == image_token]
    blocks = sum(token == image_token != before for before, token in pairwise([None, *expanded]))
    if 1 < len(places) < blocks:
        raise BadInput(f"{location}: the model's processor writes images in rows. Use one image per prompt")
    starts, ends = [0, *(place + 1 for place in places)], [*places, len(ids)]
    source: list[int] = []
    for start, end in zip(starts, ends, strict=True):
        chunk, is_last = list(ids[start:end]), end == len(ids)
        first = len(expanded) - len(chunk) if is_last else len(source) + (start > 0)
        while list(expanded[first : first + len(chunk)]) != chunk and first < len(expanded) and not is_last and start:
            first += 1
        if first < len(source) or list(expanded[first : first + len(chunk)]) != chunk:
            raise BadInput(f"{location}: the model's processor changes the text around an image. Use text only")
        source += [-1] * (first - len(source)) + [*range(start, end)]
    return source
