"""Adding a command or an option means editing a list here, in plain sight of the review."""

import re
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from layertap.cli.app import make_app
from layertap.cli.reporting import bytes_text, parse_bytes, runs_text, seconds_text

SURFACE = {
    "clean": ["--dry-run", "--ttl-seconds", "folder"],
    "doctor": [
        "--device",
        "--dtype",
        "--engine",
        "--json",
        "--picture",
        "--revision",
        "--storage",
        "--trust-remote-code",
        "model",
    ],
    "export": ["--context-size", "--format", "--model", "--no-verify", "--verify", "folder", "out"],
    "extract": [
        "--add-generation-prompt",
        "--chat-template-kwargs",
        "--compress",
        "--device",
        "--dtype",
        "--engine",
        "--field",
        "--fsync",
        "--input-format",
        "--layers",
        "--layout",
        "--limit",
        "--loss-mask",
        "--max-memory",
        "--max-model-len",
        "--max-num-batched-tokens",
        "--max-tokens",
        "--no-fsync",
        "--no-loss-mask",
        "--out",
        "--positions",
        "--quiet",
        "--ray",
        "--ray-actors",
        "--ray-cpus",
        "--regenerate",
        "--resume-check",
        "--revision",
        "--save-dtype",
        "--seed",
        "--shard",
        "--shard-seconds",
        "--shard-size",
        "--share-prefixes",
        "--temperature",
        "--template-date",
        "--text-unit",
        "--tokenizer",
        "--top-k",
        "--top-p",
        "--trust-remote-code",
        "-q",
        "input",
        "model",
    ],
    "import": ["--compress", "--from", "--layers", "--model", "--num-layers", "--out", "--quiet", "-q", "folder"],
    "inspect": ["--plot", "--sample", "--tokenizer", "--top", "path"],
    "plan": [
        "--chat-template-kwargs",
        "--device",
        "--dtype",
        "--field",
        "--input-format",
        "--layers",
        "--limit",
        "--max-model-len",
        "--measure",
        "--measure-seconds",
        "--out",
        "--positions",
        "--revision",
        "--sample",
        "--save-dtype",
        "--tokenizer",
        "--trust-remote-code",
        "input",
        "model",
    ],
    "serve": [
        "--allow-custom-save-path",
        "--allow-delete",
        "--allow-weight-updates",
        "--api-key",
        "--capture-by-default",
        "--device",
        "--dtype",
        "--engine",
        "--fsync",
        "--handover",
        "--host",
        "--kv-transfer-config",
        "--layers",
        "--max-body-bytes",
        "--max-bytes-in-flight",
        "--max-logprobs",
        "--max-model-len",
        "--max-num-batched-tokens",
        "--max-num-seqs",
        "--max-running",
        "--max-storage-bytes",
        "--min-free-bytes",
        "--no-capture-by-default",
        "--no-fsync",
        "--no-use-synchronization-lock",
        "--num-writer-processes",
        "--num-writer-threads",
        "--port",
        "--prefix-rows-bytes",
        "--revision",
        "--save-dtype",
        "--served-model-name",
        "--shared-storage-path",
        "--speculative-config",
        "--spot-check",
        "--storage",
        "--tokenizer",
        "--trust-remote-code",
        "--ttl-seconds",
        "--use-synchronization-lock",
        "--weights-version",
        "model",
    ],
    "serve-files": ["--allow-delete", "--api-key", "--host", "--port", "folder"],
    "verify": [
        "--device",
        "--json",
        "--model",
        "--quarantine",
        "--recompute",
        "--sample",
        "--seed",
        "--trust-remote-code",
        "path",
    ],
}


def test_commands_and_options_are_the_known_ones():
    commands = typer.main.get_command(make_app()).commands
    found = {
        name: sorted(word for one in command.params for word in (*one.opts, *one.secondary_opts))
        for name, command in commands.items()
    }
    assert found == SURFACE


@pytest.mark.parametrize("command", SURFACE)
def test_help_names_every_option_in_full_on_a_narrow_terminal(command):
    done = CliRunner().invoke(make_app(), [command, "--help"], env={"COLUMNS": "60"})
    assert done.exit_code == 0, done.output
    for name in SURFACE[command]:
        assert re.search(rf"{name}(?![\w-])", done.output, re.IGNORECASE), name
    assert max(len(line) for line in done.output.splitlines()) <= 60


@pytest.mark.parametrize("no_color", ["", "1"])
def test_errors_are_red_unless_no_color_is_set(no_color, tmp_path):
    done = CliRunner().invoke(make_app(), ["clean", str(tmp_path / "gone")], color=True, env={"NO_COLOR": no_color})
    assert "there is no such folder" in done.output
    assert ("\x1b[31m" in done.output) is not bool(no_color)


def test_help_costs_no_heavy_import():
    script = (
        "import sys\n"
        "from layertap.cli import main\n"
        "sys.argv = ['layertap', 'extract', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pyarrow', 'safetensors', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--layers" in done.stdout


def test_sizes_and_times_are_read_and_said():
    assert [parse_bytes(text) for text in ("2GiB", "500 MB", "1.5k", "7")] == [2 << 30, 500_000_000, 1500, 7]
    assert [bytes_text(size) for size in (0, 1023, 1536, 3 << 30, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 GiB",
        "5.0 TiB",
    ]
    assert [seconds_text(seconds) for seconds in (0.4, 61, 3723)] == ["0:00", "1:01", "1:02:03"]


def test_layer_ids_are_said_in_their_order_with_runs_as_their_ends():
    said = {(0, 1, 2, 3, 7): "0-3, 7", (4, 5): "4, 5", (3, 2, 1): "3, 2, 1", (8, 0, 1, 2): "8, 0-2", (): ""}
    assert {ids: runs_text(ids) for ids in said} == said
