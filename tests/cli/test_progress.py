from io import StringIO

from rich.console import Console

from layertap.cli.progress import RunProgress, summary
from layertap.datasets.extraction import RunReport


def make_report(tmp_path):
    return RunReport(folder=tmp_path, num_samples=3, num_skipped=4, num_failed=1, num_tokens=500, num_bytes=5 << 20)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_the_bar_on_a_terminal_shows_what_the_text_says(tmp_path):
    shown = StringIO()
    console = Console(file=shown, force_terminal=True, width=150)
    with RunProgress(10, quiet=False, console=console) as progress:
        progress.begin(make_report(tmp_path))
    assert "8/10 prompts, 1 failed" in shown.getvalue()
    assert progress.share == 0.8


def test_rates_and_time_left_are_those_of_the_last_minute(tmp_path):
    clock = Clock()
    progress = RunProgress(1000, quiet=True, clock=clock)
    assert progress.text() == "checking what is done already"
    report = RunReport(folder=tmp_path, num_skipped=400)
    progress.begin(report)
    clock.now += 500
    assert progress.text() == "400/1,000 prompts, starting"
    for _ in range(10):  # slow at first
        report.num_samples += 1
        progress.text()
        clock.now += 10
    for _ in range(70):
        report.num_samples += 2
        report.num_tokens += 1000
        report.num_bytes += 3 << 20
        clock.now += 1
        progress.text()
    assert progress.text() == "550/1,000 prompts, 1,000 tokens/s, 3.0 MiB/s, 3:45 left"
    progress.note("stopping: wait")
    assert progress.text().endswith("left, stopping: wait")


def test_without_a_total_there_is_no_time_left(tmp_path):
    progress = RunProgress(None, quiet=True)
    progress.begin(make_report(tmp_path))
    assert progress.text() == "8 prompts, 1 failed"
    assert progress.share == 0.0


def test_where_there_is_no_terminal_a_line_comes_now_and_then(tmp_path, capsys):
    clock = Clock()
    progress = RunProgress(10, quiet=False, console=Console(file=StringIO()), clock=clock)
    progress.begin(make_report(tmp_path))
    for _ in range(61):
        progress.tick()
        clock.now += 1
    progress.note("stopping: wait")
    assert capsys.readouterr().err.splitlines() == [
        "8/10 prompts, 1 failed",
        "8/10 prompts, 0 tokens/s, 0 B/s, 1 failed",
        "stopping: wait",
    ]


def test_quiet_shows_nothing(tmp_path):
    shown = StringIO()
    with RunProgress(10, quiet=True, console=Console(file=shown, force_terminal=True)) as progress:
        progress.begin(make_report(tmp_path))
        progress.tick()
    assert shown.getvalue() == ""


def test_the_summary_says_what_was_done_before_and_what_was_damaged(tmp_path):
    report = make_report(tmp_path)
    report.damaged = ["w0-000003: cut off"]
    report.seconds = 2.0
    text = summary(report)
    for part in (
        "3 samples, 500 tokens, 5.0 MiB",
        "(250 tokens/s)",
        "4 samples had been done before",
        "w0-000003: cut off",
    ):
        assert part in text
