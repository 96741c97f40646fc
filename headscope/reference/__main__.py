"""`python -m headscope.reference` writes the generated pages."""

from headscope.reference import write_pages

write_pages()
