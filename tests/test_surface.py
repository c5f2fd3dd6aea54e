"""The public names are frozen: to add or remove one, change this list in the same review."""

import subprocess
import sys

import layertap
from layertap import errors

PUBLIC = {
    "LLM",
    "AsyncLLM",
    "KVTransferConfig",
    "SamplingParams",
    "cleanup_hidden_states",
    "load_hidden_states",
    "open_dataset",
    "__version__",
}
ERRORS = {
    "CorruptError",
    "EngineError",
    "ExtractionError",
    "ForeignError",
    "HiddenStatesError",
    "LayerError",
    "LayertapError",
    "MissingError",
    "ModelError",
    "OptionError",
    "PromptError",
    "StoreFullError",
    "TargetExistsError",
    "TornError",
    "UnsupportedModelError",
    "WaitTimeoutError",
    "WriterDiedError",
}


def test_public_names_are_the_listed_ones_and_all_of_them_load():
    assert set(layertap.__all__) == PUBLIC | ERRORS
    assert set(errors.__all__) == ERRORS
    for name in layertap.__all__:
        assert getattr(layertap, name) is not None
    assert set(dir(layertap)) == PUBLIC | ERRORS


def test_the_error_tree_in_the_docstring_is_the_real_one():
    for name in ERRORS:
        assert name in errors.__doc__, name
        assert issubclass(getattr(errors, name), errors.LayertapError)


def test_vllms_example_finds_its_module():
    from layertap import example_hidden_states_connector

    assert example_hidden_states_connector.load_hidden_states is layertap.load_hidden_states
    assert example_hidden_states_connector.cleanup_hidden_states is layertap.cleanup_hidden_states


def test_importing_layertap_loads_nothing_heavy():
    heavy = ("torch", "transformers", "numpy", "pyarrow", "rich", "typer", "fastapi", "accelerate")
    code = f"import sys, layertap; print([m for m in {heavy!r} if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_reading_and_writing_files_needs_no_torch():
    code = "import sys, layertap.files.read, layertap.writing.recorder; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "False"
    )
