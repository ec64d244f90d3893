"""Random small graphs."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from dask_eindecomp.graph import EinGraph

FORMS = ("ij,jk->ik", "ij,jk->jik", "ij,kj->ik", "ij,ij->ij", "ij,ij->i", "ij,jk->", "ij->ji", "ij->i")


@st.composite
def graphs(draw: Any, nodes: int = 4, extents: tuple[int, ...] = (2, 4, 8)) -> EinGraph:
    """A DAG of matrices and what is made of them: shared inputs, fan-out, several outputs."""
    shapes: dict[str, tuple[int, ...]] = {
        name: (draw(st.sampled_from(extents)), draw(st.sampled_from(extents))) for name in "AB"
    }
    inputs = dict(shapes)
    spec: dict[str, tuple[Any, ...]] = {}
    for number in range(draw(st.integers(1, nodes))):
        matrices = [name for name, shape in shapes.items() if len(shape) == 2]
        left = draw(st.sampled_from(matrices))
        form = draw(st.sampled_from(FORMS))
        operands = [left]
        i, j = shapes[left]
        lengths = {"i": i, "j": j}
        if "," in form:
            right_labels = form.split("->")[0].split(",")[1]
            fitting = [
                name
                for name in matrices
                if all(
                    lengths.get(label, extent) == extent for label, extent in zip(right_labels, shapes[name])
                )
            ]
            if not fitting:
                form = "ij->ji"
            else:
                operands.append(draw(st.sampled_from(fitting)))
                lengths |= dict(zip(right_labels, shapes[operands[1]]))
        name = f"N{number}"
        spec[name] = (form, *operands)
        shapes[name] = tuple(lengths[label] for label in form.split("->")[1])
    outputs = draw(st.sets(st.sampled_from(sorted(spec)), min_size=1))
    return EinGraph.from_spec(inputs, spec, sorted({*outputs, *list(spec)[-1:]}))
