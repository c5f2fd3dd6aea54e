"""What an examination finds: a line a check, with a verdict, and the errors by layer."""

from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["good", "note", "bad"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One check.

    Attributes:
        section: where it is listed.
        name: what was checked.
        state: "good"; "note" for what is worth knowing; "bad" for what must not be used.
        text: what was found, with its numbers.
    """

    section: str
    name: str
    state: State
    text: str


@dataclass(frozen=True, slots=True)
class LayerError:
    """How far the rows of one layer are from the reference: relative errors, and the worst row's place."""

    layer: int
    median: float
    worst: float
    position: int
    token: str
    tolerance: float


@dataclass(slots=True)
class Report:
    """Everything that was found."""

    model: str
    engine: str
    findings: list[Finding] = field(default_factory=list)
    layers: list[LayerError] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def add(self, section: str, name: str, state: State, text: str) -> None:
        """Note a finding."""
        self.findings.append(Finding(section, name, state, text))

    @property
    def bad(self) -> list[Finding]:
        """What must not be used."""
        return [finding for finding in self.findings if finding.state == "bad"]

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        import dataclasses

        return {"verdict": "bad" if self.bad else "good", **dataclasses.asdict(self)}
