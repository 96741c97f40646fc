r"""Writes 22 English works that no shipped adapter was trained or tuned on, for judging claims about these adapters.

On Debian 12:

    apt-get download aptitude-doc-en bash-doc debian-handbook debian-policy dict-devil exim4-doc-html git-doc \
        harden-doc installation-guide-amd64 maint-guide mutt nethack-common postgresql-doc-15 python3.11-doc \
        r-cran-janeaustenr r-doc-html valgrind
    for package in *.deb; do dpkg -x $package packages; done
    python -m headscope.prompts.unseen_texts packages texts

Six novels, fifteen manuals and a dictionary. Collections of quotations and WordNet are left out: the training texts
hold the plays that are quoted, and a dictionary with parts of WordNet.
"""

import argparse
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

from headscope.prompts.packaged_texts import normalize_whitespace, read_gzipped, text_from_html

NOVELS = ("emma", "mansfieldpark", "northangerabbey", "persuasion", "prideprejudice", "sensesensibility")
MANUALS = {
    "debian-handbook": ("debian-handbook/html/en-US/sect.[b-w]*.html", "Debian contains dozens of other backup"),
    "postgresql": ("postgresql-doc-15/html/tutorial-[a-w]*.html", "Once you have created a database"),
    "git": ("git-doc/user-manual.txt", "Git is a fast"),
    "nethack": ("nethack-common/Guidebook.txt.gz", "whether  you have in fact been having those dreams"),
    "python": ("python3.11/html/_sources/tutorial/[acdi]*.rst.txt", "If you do much work on computers"),
    "debian-policy": ("debian-policy/policy.txt.gz", "This manual describes"),
    "valgrind": ("valgrind/html/manual-core.html", "This chapter describes"),
    "r": ("../R/doc/manual/R-intro.html", "R is an integrated suite"),
    "bash": ("bash/bashref.html", "Bash is the shell"),
    "exim": ("exim4-doc-html/spec_html/ch-how_exim_*.html", "Exim is designed to work"),
    "mutt": ("mutt/manual.txt.gz", "Mutt is a small"),
    "securing-debian": ("harden-doc/html/en-US/ch0*.html", "Now to the official part."),
    "installation": ("installation-guide-amd64/en/ch0*.html", "This chapter provides an overview"),
    "maintainers": ("maint-guide/html/[bdmu]*.en.html", "We should now be ready"),
    "aptitude": ("aptitude/html/en/ch0*.html", "A journey of"),
}
"""The pages of each manual, relative to the folder of documents, and the words with which its text starts."""
DOCUMENTS = "usr/share/doc"
DICTIONARY_FILE = "usr/share/dictd/devil.dict.dz"
NOVELS_FILE = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
REQUIRED = (NOVELS_FILE, DICTIONARY_FILE, *(f"{DOCUMENTS}/{pages}" for pages, _ in MANUALS.values()))
"""Files of the packages; a pattern needs one."""


def works(packages: Path) -> Iterator[tuple[str, str]]:
    """The kind and name of each work, and its text."""
    for name, text in zip(NOVELS, read_novels(packages / NOVELS_FILE), strict=True):
        yield f"novel-{name}", text
    for name, manual in MANUALS.items():
        yield f"manual-{name}", read_manual(packages / DOCUMENTS, *manual)
    yield "dictionary-devil", read_dictionary(packages / DICTIONARY_FILE, "ABASEMENT")


def read_novels(file: Path) -> list[str]:
    """Jane Austen's novels without title and contents, in the order of `NOVELS`, from an R package's database.

    Each value in the file is its length (4 bytes) and a zlib stream with R's serialization of a vector of strings.
    """
    data, novels = file.read_bytes(), []
    while data:
        stream = zlib.decompressobj()
        lines = strings_of_vector(stream.decompress(data[4:]))
        data = stream.unused_data
        start = next(place for place, line in enumerate(lines) if re.match(r"chapter (1|i)\b", line, re.IGNORECASE))
        novels.append(normalize_whitespace("\n".join(lines[start + 1 :])))
    return novels


def strings_of_vector(serialized: bytes) -> list[str]:
    """The strings of a character vector in R's binary format: each is a type (0x00 .. 0x09), a length and its bytes."""
    place, strings = serialized.index(b"\0\0\0\x10") + 8, []
    count = int.from_bytes(serialized[place - 4 : place], "big")
    for _ in range(count):
        length = int.from_bytes(serialized[place + 4 : place + 8], "big")
        strings.append(serialized[place + 8 : place + 8 + length].decode())
        place += 8 + length
    return strings


def read_dictionary(file: Path, first_entry: str) -> str:
    """The entries of a dictionary for dictd from this one on; those before it describe the dictionary."""
    return text_from(f"\n{first_entry}", normalize_whitespace(read_gzipped(file)), file).lstrip()


def read_manual(folder: Path, pages: str, first_words: str) -> str:
    """The pages that match this pattern, in the order of their names, as one text that starts with these words."""
    text = normalize_whitespace("\n\n".join(map(read_page, sorted(folder.glob(pages)))))
    return text_from(first_words, text, folder / pages)


def text_from(first_words: str, text: str, source: Path) -> str:
    """The text from these words on."""
    if first_words not in text:
        sys.exit(f"'{first_words.strip()}' is not in {source}. Unpack the packages of Debian 12")
    return text[text.index(first_words) :]


def read_page(file: Path) -> str:
    """The text of a page: HTML, gzipped or plain."""
    if file.suffix == ".gz":
        return read_gzipped(file)
    text = file.read_text(errors="replace")
    return text_from_html(text) if file.suffix == ".html" else text


def write_texts(packages: Path, folder: Path) -> None:
    """Write the works into the new `folder`."""
    if folder.exists():
        sys.exit(f"{folder} exists. Give a new folder")
    if missing := [path for path in REQUIRED if not any(packages.glob(path))]:
        sys.exit(f"{packages} has no {', '.join(missing)}. Unpack all packages that this module names")
    texts = dict(works(packages))
    if short := [name for name, text in texts.items() if len(text) < 4096]:
        sys.exit(f"{', '.join(short)}: fewer than 4,096 characters. Unpack all packages that this module names")
    folder.mkdir(parents=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path, help="the folder with the unpacked packages")
    parser.add_argument("folder", type=Path, help="a new folder for the texts")
    arguments = parser.parse_args()
    write_texts(arguments.packages, arguments.folder)
