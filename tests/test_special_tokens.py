"""Special tokens of prompts: a BOS that the text repeats is named, and a chat template brings its own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import families, tokenizers
from support.refusals import assert_names, refuses

import headscope as hs
from headscope.errors import BadInput
from headscope.positions.model import Model
from headscope.prompts.pair_sets import file_pairs
from headscope.prompts.texts import load_token_documents, prompt_tokens

CHAT = "{{ bos_token }}{% for m in messages %}[user]{{ m['content'] | trim }}[/user]{% endfor %}[assistant]"
PROMPT = "To be, or not to be"


@pytest.fixture(scope="module")
def model() -> Model:
    """A model whose tokenizer begins every text with <s>, as Llama's do."""
    tokenizer = tokenizers._metaspace()
    fast = tokenizers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=CHAT
    )
    return hs.load(families.build("llama", {"vocab_size": 700}), tokenizer=fast)


def chat_ids(model: Model) -> list[int]:
    messages = [{"role": "user", "content": PROMPT}]
    ids = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    return [*ids]


def test_a_prompt_that_repeats_the_bos_of_its_tokenizer_is_named_in_one_line(
    model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hs.patterns(model, prompt=f"<s>{PROMPT}", out=tmp_path, quiet=True)
    hs.ablate(model, prompt=f"<s>{PROMPT}", answer="a", metric="nll", heads=["L0H0"], out=tmp_path, quiet=True)
    of_prompt, of_ablation = (message for message in caplog.messages if "'<s>'" in message)
    assert_names(of_prompt, "1 of 1", "prompts")
    assert_names(of_ablation, "1 of 1", "prompts")


def test_documents_and_pairs_that_repeat_the_bos_are_counted_in_one_line(
    model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, start in enumerate(("<s>", "")):
        (tmp_path / f"{number}.txt").write_text(
            f"{start}{number} {tokenizers.play()[number * 500 : number * 500 + 400]}"
        )
    load_token_documents(f"file:{tmp_path}/*.txt", model.tokenizer, 2, 20)
    pair = {"name": "a", "clean": f"<s>{PROMPT}", "corrupted": PROMPT, "answer": "a"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair))
    file = str(tmp_path / "pairs.jsonl")
    file_pairs(file, model.tokenizer, "end", needs_one_token=False, needs_wrong=False)
    of_documents, of_pairs = (message for message in caplog.messages if "'<s>'" in message)
    assert_names(of_documents, "1 of 2", "documents", f"file:{tmp_path}/*.txt")
    assert_names(of_pairs, "1 of 2", "prompts", f"'{file}'")


def test_a_prompt_without_repeated_bos_is_not_named(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    ids = prompt_tokens(PROMPT, model.tokenizer, 100)
    assert ids.count(model.tokenizer.bos_token_id) == 1
    assert prompt_tokens(PROMPT, tokenizers.tokenizer("byte-level"), 100)
    assert "<s>" not in caplog.text


def test_a_prompt_in_the_chat_template_has_the_tokens_of_apply_chat_template(
    model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = hs.patterns(model, prompt=PROMPT, template=True, out=tmp_path, quiet=True)
    assert run.token_text["token"].tolist() == chat_ids(model)
    assert "<s>" not in caplog.text


def test_ablation_of_a_prompt_in_the_chat_template_measures_the_answer_after_it(model: Model, tmp_path: Path) -> None:
    run: Any = hs.ablate(
        model, prompt=PROMPT, template=True, answer="a", metric="nll", heads=["L0H0"], out=tmp_path, quiet=True
    )
    text = model.tokenizer.decode(chat_ids(model))
    continued = model.tokenizer(f"{text}a", add_special_tokens=False)["input_ids"][len(chat_ids(model)) :]
    ids = torch.tensor([[*chat_ids(model), *continued]])
    with torch.no_grad():
        losses = -model.module(ids).logits.log_softmax(-1)[0]
    first = len(chat_ids(model))
    expected = sum(float(losses[first + n - 1, token]) for n, token in enumerate(continued)) / len(continued)
    assert run.ablation["metric_before"].iloc[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("template", "named"),
    [
        (None, "tokenizer"),
        ("hello", "user"),
        ("{{ raise_exception('no') }}", "(no)"),
    ],
)
def test_a_chat_template_that_cannot_be_used_is_refused(template: str | None, named: str) -> None:
    tokenizer = tokenizers.PreTrainedTokenizerFast(tokenizer_object=tokenizers._byte_level(), chat_template=template)
    with refuses(BadInput, "template", named):
        prompt_tokens(PROMPT, tokenizer, 100, template=True)
