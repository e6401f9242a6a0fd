"""Whoever computes which part, and whatever layers it uses: the single process's gradients."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.crew import Crew, Part, assert_same, gradients, parts, reference
from tests.tiers import examples

INPUTS = [part.x for part in parts(6)]

part = st.builds(
    lambda weight, index, through: Part(weight=weight, x=INPUTS[index], through=tuple(through)),
    weight=st.floats(0.25, 50.0),
    index=st.integers(0, len(INPUTS) - 1),
    through=st.sets(st.integers(0, 2), min_size=1),
)
dealt = st.lists(st.lists(part, max_size=3), min_size=1, max_size=4).filter(any)


@examples(30)
@given(dealt=dealt, bucket_bytes=st.sampled_from([1, 100, 200, 10_000]))
def test_the_mean_is_that_of_a_single_process(dealt: list[list[Part]], bucket_bytes: int) -> None:
    crew = Crew(len(dealt), bucket_bytes=bucket_bytes)
    crew.compute(dealt)
    own = [gradients(model) for model in crew.models]
    live = [[p.grad for p in model.parameters()] for model in crew.models]
    found = crew.collect()
    alone = reference(dealt)
    assert len(set(found)) == 1
    for model in crew.models:
        assert_same(model, alone, 1e-12)
    for tensors, before in zip(live, own, strict=True):  # never written to
        for gradient, (name, mine) in zip(tensors, before.items(), strict=True):
            assert (mine is None) == (gradient is None), name
            assert mine is None or gradient is None or mine.equal(gradient), name
