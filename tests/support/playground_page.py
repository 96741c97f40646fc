"""The playground in a browser: wait for the results of a prompt."""

from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Page, Response

CONTINUATION = '{"output":"playground-continuation.children"'
"""Start of the request for the continuation, the last one about a prompt."""


@contextmanager
def waiting_for_results(page: Page, prompt: str) -> Iterator[None]:
    """Wait for the answer to the last request about a prompt that is run inside."""

    def continues(response: Response) -> bool:
        data = response.request.post_data or ""
        return data.startswith(CONTINUATION) and f'"prompt":"{prompt}"' in data

    with page.expect_response(continues, timeout=120_000):
        yield
