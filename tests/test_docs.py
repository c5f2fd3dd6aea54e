"""Every example of the docs is run: Python fences of a page in one namespace, console fences in one folder.

The pages name a real model. Here the folder holds a tiny random one of the same kind under that name, so that loading it needs no
network. A fence must say what it is; those that aren't run are of a kind that can't be (text, json, a shell that installs things).
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN, SHOWN = {"python", "console"}, {"text", "json", "sh", "toml", "yaml", "py"}  # py: with vLLM, by its own tests
MODELS = {"HuggingFaceTB/SmolLM2-135M-Instruct": "llama", "Qwen/Qwen3-8B": "qwen3"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from layertap.testing import zoo

    folder = tmp_path_factory.mktemp("docs")
    for name, case in MODELS.items():
        saved = zoo.save(case, folder / "zoo")
        config = zoo.config(case)
        config.num_hidden_layers, config.layer_types = 8, None  # deep enough for the presets
        zoo.model_class(case)(type(config).from_dict(config.to_dict())).save_pretrained(saved)
        (folder / name).parent.mkdir(exist_ok=True)
        saved.rename(folder / name)
    return folder


def fences(page):
    return FENCE.findall(page.read_text())


def test_readme_opens_with_two_commands_of_the_makefile_and_ci_runs_its_tests():
    commands = [line.split("#")[0].strip() for line in fences(PAGES[0])[0][1].splitlines()]
    assert commands == ["make demo", "make test"]
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == commands[1]
    for command in commands:
        assert re.search(f"^{command.removeprefix('make ')}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_fence_says_what_it_is(page):
    assert {kind for kind, _ in fences(page)} <= RUN | SHOWN


def headings(page):
    """Anchors as GitHub makes them."""
    text = FENCE.sub("", page.read_text())
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = page.parent / file if file else page
        assert linked.exists(), target
        assert not anchor or anchor in headings(linked), target


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(kind in RUN for kind, _ in fences(page))], ids=lambda page: page.name
)
def test_the_examples_of_a_page_run(page, folder, tmp_path, monkeypatch):
    for entry in os.listdir(folder):
        (tmp_path / entry).symlink_to(folder / entry)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    namespace = {"__name__": "docs"}
    for number, (kind, text) in enumerate(fences(page)):
        if kind == "python":
            exec(compile(text, f"{page.name}, fence {number}", "exec"), namespace)
        elif kind == "console":
            for line in text.splitlines():
                if line.startswith("$ "):
                    done = subprocess.run(line[2:], shell=True, capture_output=True, text=True)
                    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


def test_vllms_offline_example_runs_with_only_its_imports_changed(folder):
    script = ROOT / "examples" / "extract_hidden_states_offline.py"
    done = subprocess.run([sys.executable, script, "Qwen/Qwen3-8B"], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Extracted hidden states shape: torch.Size([" in done.stdout
