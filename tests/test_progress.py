"""Lines about the progress of a study."""

import pytest

from headscope.study import progress
from headscope.study.progress import ProgressLines


class Clock:
    """A clock that tests set."""

    seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_long_work_is_announced_once_its_time_can_be_estimated(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ProgressLines()
    lines.start(100.0, 0.0)
    lines.set_activity("base: prompt 0")
    for step in range(1, 5):
        clock.seconds = 4.0 * step
        lines.advance(1.0)
    lines.stop()
    printed = capsys.readouterr().err.splitlines()
    assert printed[1] == "This takes about 6 min. Ctrl-C keeps what is finished."
    assert [line for line in printed if line.startswith("This takes")] == printed[1:2]
    assert printed[-1] == "  3 %  base: prompt 0  (about 6 min left)", "a line after ten seconds within one job"


def test_opening_the_model_does_not_count_in_the_expected_time(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ProgressLines()
    lines.start(50.0, 0.0)
    clock.seconds = 120.0
    for _ in range(8):
        lines.advance(1.0)
        clock.seconds += 1.0
    lines.stop()
    assert "This takes" not in capsys.readouterr().err


def test_short_work_is_not_announced(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ProgressLines()
    lines.start(10.0, 0.0)
    for step in range(1, 10):
        clock.seconds = float(step)
        lines.advance(1.0)
    lines.stop()
    assert capsys.readouterr().err == ""


def test_a_job_that_reports_no_progress_has_a_line_every_ten_seconds(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ProgressLines()
    lines.start(100.0, 0.0)
    lines.set_activity("base: prompt 0")
    for _ in range(12):
        clock.seconds += 2.0
        lines.print_if_due()
    lines.stop()
    printed = capsys.readouterr().err.splitlines()
    assert printed[1:] == [
        f"  0 %  base: prompt 0  (for {seconds} s; the time left is not known yet)" for seconds in (12, 24)
    ]


def test_the_expected_time_appears_within_seconds_of_the_first_progress(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ProgressLines()
    lines.start(10_000.0, 0.0)
    for seconds in (6.0, 12.0):
        clock.seconds = seconds
        lines.advance(10.0)
    lines.stop()
    assert capsys.readouterr().err.splitlines()[0] == "This takes about 100 min. Ctrl-C keeps what is finished."


def test_no_time_is_left_when_all_is_done(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ProgressLines()
    lines.start(1.0, 0.0)
    for _ in range(12):  # 0.1 twelve times is more than 1
        clock.seconds += 1.0
        lines.advance(0.1)
    lines.set_activity("base: positions")
    lines.stop()
    assert capsys.readouterr().err.splitlines()[-1] == "120 %  base: positions"


def test_work_that_cannot_be_resumed_promises_nothing_about_an_interruption(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ProgressLines(can_resume=False)
    lines.start(100.0, 0.0)
    for step in range(4):
        clock.seconds = 4.0 * step
        lines.advance(1.0)
    lines.stop()
    assert capsys.readouterr().err.splitlines()[0] == "This takes about 6 min."


@pytest.mark.slow
def test_a_benchmark_says_what_it_times_and_how_much_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from headscope.bench.timing import time_calls

    rows = time_calls(1024, {"plain": list, "measured": list}, 2, torch.device("cpu"))
    assert len(rows) == 2
    assert (
        capsys.readouterr().err.splitlines()[0] == "  0 %  timing 2 calls of 1,024 tokens"
    )  # a slow machine adds lines
