"""Judge facts: each finding is ok, warn or fail, with one sentence and one cure. Pure."""

from __future__ import annotations

import ipaddress
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from paceline.doctor.facts import Facts
from paceline.doctor.variables import interface_fits, judge_variables
from paceline.explain.reading import recognise
from paceline.job.environment import FIREWALL_PORTS
from paceline.machine import format_bytes

_CLOCK_S = 0.5
_SLOWER = 3
_SHM_BYTES = 1 << 30
_SLOW_DISK = 50e6
_PREFETCH = 2  # torch's prefetch_factor
_FEW_PORTS = 1000
_MAY_DIFFER = ("python", "driver")

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One sentence on one subject, with a cure unless the level is ok."""

    name: str
    level: Level
    what: str
    cure: str = ""


@dataclass(frozen=True, kw_only=True)
class Need:
    """What the job will need: loader workers of each rank, and the size of a batch in bytes."""

    workers: int = 0
    batch_bytes: int = 0


def judge(found: Facts, need: Need) -> list[Finding]:
    """All findings on the facts of `session.examine`: host by host, then between hosts."""
    ranks: list[Facts] = found["ranks"]
    hosts = [facts for facts in ranks if facts["local_rank"] == 0]
    names = _names(hosts)
    by_rank = {host["rank"]: host for host in hosts}
    ways = {link["from"]: _way(link, by_rank[link["from"]]) for link in found["links"]}
    findings = [*_versions(hosts, names)]
    for host in hosts:
        here, first = names[host["rank"]], host["rank"]
        local = [f for f in ranks if first <= f["rank"] < first + host["local_world_size"]]
        findings += [*_devices(host, local, here), *_cores(host, here, need)]
        findings += [*_memory(host, here, need), *_folder(host, here, found["shared"])]
        findings += [*_name(host, here, ways), *_ports(host, here)]
        told = judge_variables(host, several_hosts=len(hosts) > 1)
        findings += [Finding("variables", "warn", f"{here}: {w}", c) for w, c in told]
    return findings + [*_links(found["links"], by_rank, names), *_reduce(found["reduce"])]


def _names(hosts: list[Facts]) -> dict[int, str]:
    """A name for each host, by its first rank; containers often have equal host names."""
    names = [host["host"] for host in hosts]
    return {
        h["rank"]: h["host"] if names.count(h["host"]) == 1 else f"{h['host']} (rank {h['rank']})"
        for h in hosts
    }


def _versions(hosts: list[Facts], names: dict[int, str]) -> Iterator[Finding]:
    told = [h["versions"] for h in hosts]
    for key in told[0]:
        values = {names[h["rank"]]: h["versions"][key] for h in hosts}
        if len(set(values.values())) > 1:
            text = ", ".join(f"{value} on {name}" for name, value in values.items())
            yield Finding(
                "versions",
                "warn" if key in _MAY_DIFFER else "fail",
                f"{key} differs: {text}.",
                f"install the same {key} on all hosts.",
            )
    if all(versions == told[0] for versions in told):
        text = ", ".join(f"{key} {value}" for key, value in told[0].items() if value != "none")
        yield Finding("versions", "ok", f"{text}, on {_count(len(hosts), 'host')}.")


def _devices(host: Facts, local: list[Facts], here: str) -> Iterator[Finding]:
    devices = [rank["device"] for rank in local if rank["device"] is not None]
    if not devices:
        yield Finding("devices", "ok", f"{here} has no GPU; ranks compute on its CPU.")
        return
    missing = [rank["rank"] for rank in local if rank["device"] and rank["device"]["missing"]]
    if missing:
        yield Finding(
            "devices",
            "fail",
            f"{here} shows {_count(host['gpus'], 'GPU')} to {len(local)} ranks.",
            "start one rank per GPU, or ask the scheduler for more.",
        )
    present = [device for device in devices if not device["missing"]]
    if len({device["uuid"] for device in present}) < len(present):
        yield Finding(
            "devices",
            "fail",
            f"ranks of {here} share a GPU.",
            "have the scheduler show all GPUs of the node to each rank, or another one to each.",
        )
    busy = [device for device in present if device["used"] > 0.1 * device["total"]]
    if busy:
        yield Finding(
            "devices",
            "warn",
            f"GPU {busy[0]['index']} of {here} has {format_bytes(busy[0]['used'])} in use already.",
            "see `nvidia-smi` for what an earlier job left.",
        )
    if not (missing or busy):
        yield Finding("devices", "ok", f"{here}: {host['gpus']} x {present[0]['name']}.")


def _cores(host: Facts, here: str, need: Need) -> Iterator[Finding]:
    cores, ranks = host["cores"], host["local_world_size"]
    total = ranks * (1 + need.workers)
    whole = f"{here} gives {_count(cores, 'core')} of {host['cores_of_host']} to {_count(ranks, 'rank')}"
    if total > cores:
        workers = f" with {_count(need.workers, 'loader worker')} each" if need.workers else ""
        yield Finding(
            "cores",
            "warn",
            f"{whole}{workers}.",
            "fewer ranks or workers, or more cores from the scheduler (--cpus-per-task).",
        )
    else:
        yield Finding("cores", "ok", f"{whole}.")


def _memory(host: Facts, here: str, need: Need) -> Iterator[Finding]:
    if host["memory_kills"]:
        yield Finding(
            "memory",
            "warn",
            f"{_count(host['memory_kills'], 'process')} died for memory in the container of {here}"
            + (f" (limit {format_bytes(host['memory_limit'])})." if host["memory_limit"] else "."),
            "fewer loader workers, a smaller micro-batch, or a higher limit.",
        )
    size, free = host["shm_size"], host["shm_free"]
    wanted = host["local_world_size"] * need.workers * _PREFETCH * need.batch_bytes
    text = f"/dev/shm of {here} has {format_bytes(free)} free of {format_bytes(size)}"
    cure = "docker run --shm-size=8g; in Kubernetes an emptyDir of medium Memory at /dev/shm."
    if wanted > free:
        text = f"{text}; batches of the loaders may need {format_bytes(wanted)}."
        yield Finding("shared memory", "fail", text, cure)
    elif size < _SHM_BYTES and not wanted:
        text = f"{text}: little for loader workers and NCCL."
        yield Finding("shared memory", "warn", text, cure)
    else:
        yield Finding("shared memory", "ok", f"{text}.")


def _folder(host: Facts, here: str, shared: list[bool] | None) -> Iterator[Finding]:
    folder = host["folder"]
    if folder is None:
        return
    where = f"{folder['path']} on {here}"
    if "error" in folder:
        text = f"{where} cannot be written to: {folder['error']}."
        yield Finding("folder", "fail", text, "choose another folder, or get the right to write.")
    elif shared is not None and not shared[host["rank"]]:
        text = f"{where} does not show what rank 0 wrote there."
        yield Finding("folder", "fail", text, "put the run folder on storage that all nodes share.")
    else:
        rate = f"{folder['bytes_per_s'] / 1e6:.0f} MB/s"
        text = f"{where}: {format_bytes(folder['free'])} free, {rate} to durable storage"
        if folder["bytes_per_s"] < _SLOW_DISK:
            yield Finding("folder", "warn", f"{text}: slow.", "use a faster disk for checkpoints.")
        else:
            yield Finding("folder", "ok", f"{text}{', shared' if shared else ''}.")


def _name(host: Facts, here: str, ways: dict[int, str | None]) -> Iterator[Finding]:
    addresses = host["names"]["addresses"]
    text = f"the name {host['host']} leads to {', '.join(addresses) or 'nothing'} on {here}"
    # Without GLOO_SOCKET_IFNAME, Gloo listens on the first address and gives it to its peers.
    outside = addresses and not _is_loopback(addresses[0])
    if outside or "GLOO_SOCKET_IFNAME" in host["variables"]:
        yield Finding("host name", "ok", f"{text}.")
        return
    usable = [n for n, found in host["interfaces"].items() if not all(map(_is_loopback, found))]
    way = ways.get(host["rank"])
    interface = way if way in usable else next(iter(usable), "<interface>")
    yield Finding(
        "host name",
        "fail" if ways else "warn",
        f"{text}; over several hosts Gloo would connect to itself.",
        f"set GLOO_SOCKET_IFNAME={interface}, or correct /etc/hosts.",
    )


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _ports(host: Facts, here: str) -> Iterator[Finding]:
    usual = FIREWALL_PORTS[0]
    if host["port_owner"] and host["variables"].get("MASTER_PORT") != str(usual):
        yield Finding(
            "ports",
            "warn",
            f"port {usual}, torch's usual one, is held on {here} by {host['port_owner']}.",
            "end it if it is left over, or use another port.",
        )
    low, high = host["ephemeral_ports"] or (0, 1 << 16)
    if high - low < _FEW_PORTS:
        yield Finding(
            "ports",
            "warn",
            f"the kernel of {here} chooses from {high - low} ports alone.",
            "sysctl net.ipv4.ip_local_port_range='32768 60999'.",
        )


def _links(
    links: list[Facts], by_rank: dict[int, Facts], names: dict[int, str]
) -> Iterator[Finding]:
    for link in links:
        yield from _link(link, by_rank[link["from"]], by_rank[link["to"]], names)
    good = [link for link in links if link["ephemeral"] == ""]
    if not good:
        return
    usual = statistics.median(link["bytes_per_s"] for link in good)
    for link in good if len(good) > 2 else ():
        if link["bytes_per_s"] < usual / _SLOWER:
            way = f"{names[link['from']]} to {names[link['to']]}"
            yield Finding(
                "network",
                "warn",
                f"{way} carries {_rate(link['bytes_per_s'])}, others {_rate(usual)}.",
                "look at that cable, port or placement; the slowest link paces all-reduces.",
            )
    rates = [link["bytes_per_s"] for link in good]
    delays = [link["latency_s"] * 1e3 for link in good]
    by = ", ".join(sorted({str(_way(link, by_rank[link["from"]])) for link in good}))
    yield Finding(
        "network",
        "ok",
        f"{len(good)} of {len(links)} ways between hosts work, {min(delays):.2f} to "
        f"{max(delays):.2f} ms, {_rate(min(rates))} to {_rate(max(rates))}, by {by}.",
    )


def _way(link: Facts, here: Facts) -> str | None:
    """The interface by which a host reached another one."""
    address = link.get("from_address")
    return next((name for name, found in here["interfaces"].items() if address in found), None)


def _link(link: Facts, here: Facts, there: Facts, names: dict[int, str]) -> Iterator[Finding]:
    a, b = names[link["from"]], names[link["to"]]
    low, high = FIREWALL_PORTS
    for kind, ports in (("ephemeral", "a port of the kernel's choice"), ("fixed", f"{low}-{high}")):
        if link[kind]:
            address = f"{link['ends']['address']}:{link['ends'][kind]}"
            text = f"{a} cannot reach {b} at {address} ({ports}): {link[kind]}."
            yield Finding("network", "fail", text, "open these ports between the hosts, both ways.")
    if abs(link.get("clock_s", 0)) > _CLOCK_S:
        text = f"the clocks of {a} and {b} differ by {abs(link['clock_s']):.1f} s."
        yield Finding("clock", "warn", text, "run chrony or ntpd on both.")
    known = {address for found in there["interfaces"].values() for address in found}
    if known.isdisjoint(link["name_leads_to"]):
        leads = ", ".join(link["name_leads_to"]) or "nothing"
        text = f"on {a} the name {there['host']} leads to {leads}, which is not {b}'s."
        yield Finding("host name", "warn", text, "use addresses, or add the name to /etc/hosts.")
    way = _way(link, here)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = here["variables"].get(variable, "")
        fitting = [name for name in here["interfaces"] if interface_fits(variable, value, name)]
        if way and fitting and way not in fitting:
            yield Finding(
                "network",
                "warn",
                f"{a} reaches {b} by {way}, but {variable}={value}.",
                f"set it to {way} unless the other network is meant.",
            )


def _reduce(told: list[Facts]) -> Iterator[Finding]:
    on_gpus = [facts["gpu"] for facts in told if "gpu" in facts]
    for name, each in (("all-reduce", told), ("all-reduce on GPUs", on_gpus)):
        errors = [facts["error"] for facts in each if "error" in facts]
        if errors:
            known = next((hit for text in errors if (hit := recognise(text))), None)
            text = errors[0].splitlines()[0][:300]
            cure = known.cause.fix if known else "see `paceline explain`, with the whole error."
            yield Finding(name, "fail", f"it failed: {text}", cure)
        elif each and not all(facts["right"] for facts in each):
            cure = "suspect memory, a cable or the network's driver; try pairs of hosts."
            yield Finding(name, "fail", "the sum is wrong.", cure)
        elif each:
            slowest: Any = max(each, key=lambda facts: facts["seconds"])
            yield Finding(
                name,
                "ok",
                f"{format_bytes(slowest['bytes'])} over {slowest['world_size']} ranks are right, "
                f"{slowest['seconds'] * 1e3:.1f} ms ({_rate(slowest['bytes'] / slowest['seconds'])}).",
            )


def _count(number: int, thing: str) -> str:
    if number == 1:
        return f"{number} {thing}"
    return f"{number} {thing}{'es' if thing.endswith('s') else 's'}"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"
