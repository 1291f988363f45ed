"""Which NIC carried how much of a sync, from the counters of every machine before and after it."""

from collections.abc import Mapping, Sequence
from typing import Any

from rdt_e2e.profiling.reading import NodeReading
from rdt_e2e.profiling.samplers import counter_difference

RECEIVED, SENT = "port_rcv_data", "port_xmit_data"


def nic_report(
    before: Sequence[NodeReading], after: Sequence[NodeReading], nics: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Bytes by port, each port's share of its machine, and the busiest against the least busy.

    Nodes that share a machine share its NICs, which are counted once. On one machine the figures say
    nothing about a sync: its bytes do not pass a NIC.

    Args:
        before: Readings with the samples from before the sync.
        after: Those from after it.
        nics: NICs that processes were restricted to ("device:port"), by node address; where there
            are any, only these are compared.

    Returns:
        `machines`: for each, its addresses, `ports` (bytes received and sent, share, rate),
        `busiest_to_least` (None where one carried nothing or there are fewer than two) and `moved`,
        every counter that moved.
    """
    started = {reading.node_id: reading.sample for reading in before}
    machines: dict[str, dict[str, Any]] = {}
    for reading in after:
        sample, earlier = reading.sample, started.get(reading.node_id, {})
        if not sample or not earlier:
            continue
        key = sample["boot_id"] or reading.node_id
        used = list(nics.get(reading.address, ()))
        if key in machines:
            machines[key]["addresses"].append(reading.address)
            machines[key]["used"] += used
            continue
        machines[key] = {
            "addresses": [reading.address],
            "used": used,
            "rates": sample["nic_rates_gbps"],
            "moved": counter_difference(earlier["nics"], sample["nics"]),
        }
    return {"machines": [_machine(one) for one in machines.values()]}


def _machine(found: Mapping[str, Any]) -> dict[str, Any]:
    moved, rates = found["moved"], found["rates"]
    ports = [
        {
            "port": port,
            "rate_gbps": rates[port],
            "received_bytes": moved.get(f"{port}:{RECEIVED}", 0),
            "sent_bytes": moved.get(f"{port}:{SENT}", 0),
            "in_use": port in found["used"] if found["used"] else rates[port] > 0,
        }
        for port in sorted(rates)
    ]
    carried = [port["received_bytes"] + port["sent_bytes"] for port in ports]
    whole = sum(carried)
    for port, num_bytes in zip(ports, carried, strict=True):
        port["share"] = num_bytes / whole if whole else None
    used = [one for port, one in zip(ports, carried, strict=True) if port["in_use"]]
    return {
        "addresses": sorted(found["addresses"]),
        "ports": ports,
        "busiest_to_least": max(used) / min(used) if len(used) > 1 and min(used) else None,
        "moved": moved,
    }
