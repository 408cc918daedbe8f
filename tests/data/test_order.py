"""The order of samples: every one once, and the same for the same seed."""

import numpy as np
import pytest
from hypothesis import given
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


@given(
    st.integers(0, 300),
    topologies,
    st.integers(0, 2**40),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(1, 9),
)
def test_every_sample_once_on_every_topology(count, topology, seed, epoch, fraction, batch):
    shares = [
        order.share(count, topology, rank, seed, epoch, fraction) for rank in range(topology.size)
    ]
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


def test_a_node_keeps_its_part_unless_a_fraction_is_redistributed():
    slots = (2, 2)
    start = order.parts(1000, slots, 5, 0)
    for epoch in (1, 4):
        for before, after in zip(start, order.parts(1000, slots, 5, epoch), strict=True):
            np.testing.assert_array_equal(before, after)
    one, two = order.parts(1000, slots, 5, 1, 0.2)
    assert 30 <= len(np.setdiff1d(one, start[0])) <= 70  # half of the 100 that were offered
    assert len(one) == len(two) == 500 and not set(one) & set(two)
    assert set(order.share(1000, Topology(2, 2), 3, 5, 1, 0.2)) <= set(two.tolist())


def test_parts_of_late_epochs_go_on_from_those_that_are_known(monkeypatch):
    late = order.parts(40, (1, 1), 5, 1500, 0.5)
    redistributed, made = order._redistributed, []
    monkeypatch.setattr(
        order, "_redistributed", lambda *args: (made.append(args[2]), redistributed(*args))[1]
    )
    order.parts(40, (1, 1), 5, 1502, 0.5)
    order.parts(40, (1, 1), 5, 1501, 0.5)
    assert made == [1501, 1502]
    early = order.parts(40, (1, 1), 5, 2, 0.5)
    order.parts(40, (1, 1), 5, 3, 0.5)
    assert made == [1501, 1502, 1, 2, 3]
    order._known.cache_clear()
    for epoch, parts in ((2, early), (1500, late)):
        assert [part.tolist() for part in order.parts(40, (1, 1), 5, epoch, 0.5)] == [
            part.tolist() for part in parts
        ]


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
