"""The order of samples: every one once, and the same for the same seed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfcommx.core import PlanError, Topology
from tfcommx.data import order

topologies = st.one_of(
    st.builds(Topology, st.integers(1, 4), st.integers(1, 4)),
    st.lists(st.integers(1, 4), min_size=2, max_size=4).map(
        lambda slots: Topology(
            len(slots), max(slots), tuple((f"host{i}", n) for i, n in enumerate(slots))
        )
    ),
)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 300),
    topologies,
    st.integers(0, 2**40),
    st.integers(0, 3),
    st.integers(1, 9),
)
def test_every_sample_once_on_every_topology(count, topology, seed, epoch, batch):
    shares = [order.share(count, topology, rank, seed, epoch) for rank in range(topology.size)]
    assert np.sort(np.concatenate(shares)).tolist() == list(range(count))
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1
    for drop in (False, True):
        steps = order.steps(count, topology, batch, drop)
        for length in lengths:
            ends = order.batch_bounds(length, batch, steps)
            sizes = np.diff(ends)
            assert len(sizes) == steps and (steps == 0 or ends[0] == 0)
            assert (
                (sizes == batch).all()
                if drop
                else ends[-1] == length and (sizes <= batch).all() and (sizes >= 0).all()
            )
            if not drop and length >= steps:
                assert (sizes > 0).all()


def test_same_seed_same_order_other_seed_or_epoch_another():
    topology = Topology(2, 2)
    same = [order.share(1000, topology, 1, 7, 3) for _ in range(2)]
    np.testing.assert_array_equal(*same)
    assert same[0].tolist() != order.share(1000, topology, 1, 8, 3).tolist()
    assert same[0].tolist() != order.share(1000, topology, 1, 7, 4).tolist()
    # This very order, on any machine and version of NumPy
    assert order.share(1000, topology, 1, 7, 3)[:6].tolist() == [768, 816, 564, 4, 605, 884]


def test_shuffle_is_uniform_enough():
    first = [int(order.share(10, Topology(1, 1), 0, 0, epoch)[0]) for epoch in range(2000)]
    assert np.bincount(first, minlength=10).min() > 140  # 200 expected, 4.5 standard deviations


def test_node_and_slot_count_through_uneven_nodes():
    topology = Topology(2, 3, (("a", 1), ("b", 3)))
    assert [topology.position_of(rank) for rank in range(4)] == [
        (0, 0),
        (1, 0),
        (1, 1),
        (1, 2),
    ]
    with pytest.raises(PlanError, match=r"\[0, 4\).*rank=4"):
        topology.position_of(4)
