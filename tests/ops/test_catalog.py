"""docs/operators.md is what the registry says."""

from pathlib import Path

from jrnn import registry
from jrnn.ops import catalog

DOCUMENT = Path(__file__).parents[2] / "docs" / "operators.md"


def test_document_is_up_to_date():
    assert DOCUMENT.read_text() == catalog.render(), "run: python -m jrnn.ops.catalog > docs/operators.md"


def test_entries_tell_inputs_arguments_and_gradients():
    found = {e.type: e for e in catalog.entries()}
    assert set(found) == {d.type for d in registry.registered()}
    assert found["LayerNorm"].inputs == "x, [gamma], [beta]"
    assert found["LayerNorm"].arguments == "axis: int = 1, epsilon: float = 1e-05, elementwise_affine: bool = 0"
    assert found["Squeeze"].arguments == "dims: ints"
    assert (found["Sum"].inputs, found["Split"].outputs) == ("x, *xs", "1 or more")
    assert [found[t].gradient for t in ("FC", "StopGradient", "EQ")] == ["yes", "stops", "none"]
    assert (found["Dropout"].notes, found["Dropout"].outputs) == ("random, in place: output 0 over input 0", "1 to 2")
