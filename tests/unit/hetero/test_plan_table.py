"""The plans that docs/hardware.md shows."""

from pathlib import Path

from tests.unit.hetero.plan_table import table

DOCS = Path(__file__).resolve().parents[3] / "docs/hardware.md"


def test_the_table_in_the_docs_is_what_is_planned() -> None:
    """It follows each refusal's advice, so a plan that is refused again shows advice that fails."""
    assert table() in DOCS.read_text(), "run python -m tests.unit.hetero.plan_table, and paste it"
