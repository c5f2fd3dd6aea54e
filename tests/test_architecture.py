"""Imports flow one way along the corridor; engines never import each other; nothing in the product imports `testing`."""

import ast
import tomllib
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "layertap"
# A module may import from its own room or one before it.
RANKS = {
    "errors": 0,
    "memory": 0,
    "capture": 1,
    "assembly": 2,
    "files": 2,
    "writing": 3,
    "params": 4,
    "engines": 5,
    "outputs": 6,
    "chat_templates": 6,
    "prompts": 6,
    "frontend": 7,
    "setup": 8,
    "llm": 8,
    "example_hidden_states_connector": 8,
    "datasets": 9,
    "client": 9,
    "serving": 10,
    "trust": 10,
    "cli": 11,
    "__main__": 11,
    "testing": 12,
}
# Late imports that close a circle on purpose, each with its reason.
ALLOWED = {
    ("engines/vllm/engine.py", "frontend"): "the vLLM engine is its own front end",
    ("engines/vllm/engine.py", "outputs"): "the vLLM engine is its own front end",
    ("engines/vllm/engine.py", "prompts"): "the vLLM engine is its own front end",
    ("engines/vllm/prompts.py", "prompts"): "the vLLM engine is its own front end",
}


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("layertap"):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("layertap"))


def modules():
    for path in sorted(SOURCE.rglob("*.py")):
        relative = path.relative_to(SOURCE)
        yield path, relative.as_posix(), relative.parts[0].removesuffix(".py")


def test_every_room_has_a_rank():
    assert {room for _, _, room in modules()} <= RANKS.keys() | {"__init__"}


def test_imports_flow_one_way():
    wrong = []
    for path, name, room in modules():
        if room == "__init__":
            continue  # the lazy door
        for module in imports_of(path):
            target = [*module.split("."), ""][1]
            if target and RANKS[target] > RANKS[room] and (name, target) not in ALLOWED:
                wrong.append(f"{name} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_engines_never_import_each_other():
    for path, name, room in modules():
        if room == "engines" and name.count("/") > 1:
            own = name.split("/")[1]
            for module in imports_of(path):
                parts = module.split(".")
                if len(parts) > 2 and parts[1] == "engines":
                    shared = ("bank", "base", "digests", "digest_kernel", "fp8", "fp8_kernel", "pinned", "ranges")
                    assert parts[2] in (own, *shared), f"{name} imports {module}"


def test_files_stay_readable():
    """Past 450 lines a file asks to be split."""
    long = {name: count for path, name, _ in modules() if (count := path.read_text().count("\n")) > 450}
    assert not long


def test_names_that_tests_import_mean_one_file_each():
    """The folders of helpers stand beside each other in `pythonpath`: of two files of one name, tests would get the first."""
    with (Path(__file__).parents[1] / "pyproject.toml").open("rb") as file:
        folders = tomllib.load(file)["tool"]["pytest"]["ini_options"]["pythonpath"]
    names = [
        path.name
        for folder in folders
        for path in (Path(__file__).parents[1] / folder).glob("*.py")
        if not path.name.startswith(("test_", "conftest", "__init__"))
    ]
    assert sorted(names) == sorted(set(names))
