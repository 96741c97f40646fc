"""Images of chats as the span `image`: against eager attention of transformers with the same pixel values."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.refusals import refuses
from support.tiny_studies import tokenizer
from support.vision_language import MODELS, TEXT
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPImageProcessorPil,
    LlavaProcessor,
)

import headscope as hs
from headscope.errors import BadInput, ResourceMissing, UnsupportedModel
from headscope.forward.image_inputs import check_images_are_read_in_order
from headscope.prompts.spans import align_images, parse_prompt

Image = pytest.importorskip("PIL.Image")
CHAT = (
    "{% for m in messages %}w1 {% for part in m['content'] %}{% if part['type'] == 'image' %}<image> "
    "{% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}w9"
)
TEXTS = ["w5 w6", "[[question]]w7 w8 w5[[/question]] w3"]


def build(kind: str, vocabulary: int, image_token: int) -> Any:
    """A tiny random model whose images of 28 x 28 pixels have four tokens."""
    options = dict(MODELS[kind])
    options["text_config"] = TEXT | {"vocab_size": vocabulary} | options["text_config"]
    options |= {"image_token_id": image_token, "image_token_index": image_token}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **options)
        return AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with the processor of its family."""
    folder, words = tmp_path_factory.mktemp("llava"), tokenizer()
    words.chat_template = CHAT
    words.add_special_tokens({"additional_special_tokens": ["<image>"]})
    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    options = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = LlavaProcessor(images, words, **options)
    processor.save_pretrained(folder)
    build("llava", len(words), processor.image_token_id).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        Image.fromarray(rng.integers(0, 255, (28, 28, 3), dtype=np.uint8)).save(folder / f"{name}.png")
    return folder


def write_chat(folder: Path, *images: list[str]) -> str:
    """A prompt per list of images, which come before the second message."""
    lines = []
    for names in images:
        messages = [{"role": "system", "content": TEXTS[0]}, {"role": "user", "content": TEXTS[1], "images": names}]
        lines.append(json.dumps({"messages": messages}))
    (folder / "chat.jsonl").write_text("\n".join(lines))
    return str(folder / "chat.jsonl")


def test_tokens_of_images_are_a_span_with_the_mass_of_eager_attention(
    llava: Path, pictures: Path, tmp_path: Path
) -> None:
    processor = AutoProcessor.from_pretrained(llava)
    file = write_chat(pictures, ["a.png"], ["b.png"], ["a.png", "b.png"])
    run = hs.spans(str(llava), prompts=file, out=tmp_path, quiet=True)
    assert run.heads["spans_mass"].notna().all()
    plain = AutoModelForImageTextToText.from_pretrained(llava, dtype=torch.float32)
    plain.set_attn_implementation("eager")
    for number, names in enumerate((["a"], ["b"], ["a", "b"]), start=1):
        text = "w1 w5 w6 w1 " + "<image> " * len(names) + "w7 w8 w5 w3 w9"
        images = [Image.open(pictures / f"{name}.png") for name in names]
        inputs = processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            weights = torch.stack(plain(**inputs, output_attentions=True).attentions)[:, 0]
        is_image = inputs["input_ids"][0] == processor.image_token_id
        assert is_image.sum() == 4 * len(names)
        question = slice(4 + int(is_image.sum()), 7 + int(is_image.sum()))
        rows = run.rows("spans", model="base")
        rows = rows[rows["doc"] == f"chat/{number}"]
        for query, chosen in (("question", question), ("last", slice(-1, None))):
            expected = weights[:, :, chosen][..., is_image].sum(-1).mean(-1)
            found = rows[(rows["query"] == query) & (rows["key"] == "image")].sort_values(["layer", "head"])
            np.testing.assert_allclose(found["mass"], expected.flatten(), atol=1e-5)


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl", "gemma3"])
def test_only_families_that_read_images_in_order_are_measured(kind: str) -> None:
    model = hs.load(build(kind, 128, 126), device="cpu")
    ids = torch.tensor([5, 6, 126, 126, 126, 126, 7, 8])
    pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    inputs = {"pixel_values": pixels}
    if kind == "gemma3":  # its tokens of an image attend to each other
        inputs["token_type_ids"] = (ids == 126).long()[None]
        with refuses(UnsupportedModel, f"'{model.name}'", "image"):
            check_images_are_read_in_order(model, ids, inputs)
        return
    if kind == "qwen2_5_vl":  # its positions have a time, a height and a width
        inputs = {"pixel_values": pixels.reshape(1, -1).repeat(16, 1)[:, : 3 * 2 * 14 * 14]}
        inputs |= {"image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": (ids == 126).long()[None]}
    check_images_are_read_in_order(model, ids, inputs)


def test_bad_images_are_refused(llava: Path, pictures: Path, tmp_path: Path) -> None:
    (pictures / "text.png").write_text("no image")
    file = write_chat(pictures, ["text.png"])
    with refuses(BadInput, "line 1", f"'{pictures / 'text.png'}'", "PNG"):
        hs.spans(str(llava), prompts=file, out=tmp_path, quiet=True)
    file = write_chat(pictures, ["a.png"])
    with refuses(BadInput, "line 1", "'images'", "'steer'"):
        hs.spans(str(llava), prompts=file, steer=0.1, key="image", out=tmp_path, quiet=True)
    with refuses(BadInput, "'smollm2-135m'", "images"):
        hs.spans("smollm2-135m", prompts=file, out=tmp_path, quiet=True)
    with refuses(BadInput, "'base'", "processor"):
        hs.spans(hs.load(str(llava)), prompts=file, out=tmp_path, quiet=True)


@pytest.mark.parametrize(
    ("message", "error", "named"),
    [
        ({"images": "a.png"}, BadInput, ("'images'", "'a.png'")),
        ({"images": ["none.png"]}, ResourceMissing, ("none.png'",)),
        ({"images": ["a.png"], "content": "[[image]]x[[/image]]"}, BadInput, ("'image'", "mark")),
    ],
)
def test_images_are_checked_by_line(message: Any, error: Any, named: tuple[str, ...], pictures: Path) -> None:
    content = {"messages": [{"role": "user", "content": "x"} | message]}
    with refuses(error, "line 3", *named):
        parse_prompt(content, "p", "line 3", pictures)
    content = {"messages": [{"role": "user", "content": "x", "images": ["a.png"]}], "generate": 3}
    with refuses(BadInput, "line 3", "'images'", "'generate'"):
        parse_prompt(content, "p", "line 3", pictures)


@pytest.mark.parametrize(
    ("ids", "expanded", "source"),
    [
        ([5, 0, 6], [5, 0, 0, 6], [0, -1, -1, 2]),
        ([0, 6], [0, 9, 0, 6], [-1, -1, -1, 1]),
        ([5, 0, 6, 0], [5, 0, 0, 6, 0, 0], [0, -1, -1, 2, -1, -1]),
        ([5, 0, 0], [5, 0, 0, 0], [0, -1, -1, -1]),
    ],
)
def test_tokens_of_the_text_keep_their_place_around_images(ids: Any, expanded: Any, source: Any) -> None:
    assert align_images(ids, expanded, 0, "p") == source
    with refuses(BadInput, "p:", "text"):
        align_images([7, *ids], expanded, 0, "p")


def test_images_in_rows_are_told_apart_only_if_there_is_one() -> None:
    assert align_images([1, 9, 2], [1, 9, 9, 7, 9, 9, 2], 9, "p") == [0, -1, -1, -1, -1, -1, 2]
    with refuses(BadInput, "p:", "rows"):
        align_images([1, 9, 7, 9, 2], [1, 9, 9, 7, 9, 9, 7, 9, 9, 7, 9, 9, 2], 9, "p")
