"""What joins the ranks of a node, and what a ring gets of it: one row a kind.

In a flat ring each rank of a node sends to the next one while it receives from the one before, all
at the same time:

    nvlink, pcie_switch    r0 --> r1 --> r2 --> r3     each has a way out and a way in of its own
    root_complex           r0 -> [host] -> r1, ...     all go through one root complex
    host_memory            r0 -> [memory] -> r1, ...   which writes, then reads, what each sends
    qpi                    socket 0 <--> socket 1      one message each way crosses

To add one: add a row to `WIRINGS`, with what it is in words; docs/how-to/simulate-and-plan.md lists
them.

Source: PCI Express and NVLink are duplex; that a switch forwards between its ports without the root
complex, and that GPUs without peer access go through host memory, is in NVIDIA's "GPUDirect RDMA"
guide ("Supported Systems") and in NCCL's path types (NVL, PIX, PXB, PHB, SYS).
"""

from __future__ import annotations

from typing import NamedTuple

from tfcommx.terms import Link, check_name


class Wiring(NamedTuple):
    """How messages between ranks of one node share their way."""

    # Whether the messages of all slots go through one place
    is_shared: bool
    # How often that place carries each byte: 2 if it is written there, and read from there
    passes: int
    # Whether it is as fast as NVLink: NCCL assumes shorter latencies, and its protocol LL128
    is_nvlink: bool = False


WIRINGS = {
    "nvlink": Wiring(is_shared=False, passes=1, is_nvlink=True),
    "pcie_switch": Wiring(is_shared=False, passes=1),
    "root_complex": Wiring(is_shared=True, passes=1),
    "host_memory": Wiring(is_shared=True, passes=2),
    "qpi": Wiring(is_shared=False, passes=1),
}


def get(name: str) -> Wiring:
    """Return the wiring of a name. **Raises:** PlanError for an unknown one."""
    return WIRINGS[check_name("wiring", name, WIRINGS)]


def ring_link(wire: Link, slots: int, wiring: str) -> Link:
    """Return what a rank has of a node's wires while all its slots send to their next ones.

    >>> ring_link(Link(1e-5, 1e-10), 4, "root_complex").beta_s_per_byte
    4e-10

    Args:
        wire: of one message that is alone there; measured links need no call of this, because the
            probe lets all ranks send.
        slots: ranks of the node, >= 1.
        wiring: in `WIRINGS`.

    **Raises:** PlanError for an unknown wiring.
    """
    found = get(wiring)
    streams = slots if found.is_shared else 1
    return Link(wire.alpha_s, wire.beta_s_per_byte * streams * found.passes, wire.gamma_s_per_byte)
