"""Judge facts: each finding is ok, warn or fail, with one sentence and one fix. Pure."""

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

# Limits beyond which there is a warning.
_CLOCK_OFFSET_S = 0.5
_SLOWER = 3  # times slower than the median link
_MIN_SHM_BYTES = 1 << 30
_MIN_DISK_BYTES_PER_S = 50e6
_MIN_PORTS = 1000

_PREFETCH = 2  # torch's prefetch_factor
_MAY_DIFFER = ("python", "driver")  # only a warning

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One sentence on one subject, with a fix unless the level is ok."""

    name: str
    level: Level
    what: str
    fix: str = ""


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
    used = {link["from"]: _interface(link, by_rank[link["from"]]) for link in found["links"]}
    findings = [*_versions(hosts, names)]
    for host in hosts:
        here, first = names[host["rank"]], host["rank"]
        local = [f for f in ranks if first <= f["rank"] < first + host["local_world_size"]]
        findings += [*_devices(host, local, here), *_cores(host, here, need)]
        findings += [*_memory(host, here, need), *_folder(host, here, found["shared"])]
        findings += [*_name(host, here, used), *_ports(host, here)]
        problems = judge_variables(host, several_hosts=len(hosts) > 1)
        findings += [Finding("variables", "warn", f"{here}: {what}", fix) for what, fix in problems]
    return findings + [*_links(found["links"], by_rank, names), *_reduce(found["reduce"])]


def _names(hosts: list[Facts]) -> dict[int, str]:
    """A name for each host, by its first rank; containers often have equal host names."""
    names = [host["host"] for host in hosts]
    return {
        h["rank"]: h["host"] if names.count(h["host"]) == 1 else f"{h['host']} (rank {h['rank']})"
        for h in hosts
    }


def _versions(hosts: list[Facts], names: dict[int, str]) -> Iterator[Finding]:
    all_versions = [h["versions"] for h in hosts]
    for key in all_versions[0]:
        values = {names[h["rank"]]: h["versions"][key] for h in hosts}
        if len(set(values.values())) > 1:
            text = ", ".join(f"{value} on {name}" for name, value in values.items())
            yield Finding(
                "versions",
                "warn" if key in _MAY_DIFFER else "fail",
                f"{key} differs: {text}.",
                f"install the same {key} on all hosts.",
            )
    if all(versions == all_versions[0] for versions in all_versions):
        text = ", ".join(
            f"{key} {value}" for key, value in all_versions[0].items() if value != "none"
        )
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
            "let the scheduler show all GPUs of the node to each rank, or a different one to each.",
        )
    busy = [device for device in present if device["used"] > 0.1 * device["total"]]
    if busy:
        yield Finding(
            "devices",
            "warn",
            f"GPU {busy[0]['index']} of {here} has {format_bytes(busy[0]['used'])} in use already.",
            "find the process with `nvidia-smi`; end it if an earlier job left it.",
        )
    if not (missing or busy):
        yield Finding("devices", "ok", f"{here}: {host['gpus']} x {present[0]['name']}.")


def _cores(host: Facts, here: str, need: Need) -> Iterator[Finding]:
    cores, ranks = host["cores"], host["local_world_size"]
    total = ranks * (1 + need.workers)
    usable = f"{_count(cores, 'usable core')} of {host['cores_of_host']}"
    whole = f"{here} has {usable} for {_count(ranks, 'rank')}"
    if total > cores:
        workers = f" with {_count(need.workers, 'loader worker')} each" if need.workers else ""
        yield Finding(
            "cores",
            "warn",
            f"{whole}{workers}.",
            "use fewer ranks or workers, or ask the scheduler for more cores (--cpus-per-task).",
        )
    else:
        yield Finding("cores", "ok", f"{whole}.")


def _memory(host: Facts, here: str, need: Need) -> Iterator[Finding]:
    if host["memory_kills"]:
        yield Finding(
            "memory",
            "warn",
            f"{_count(host['memory_kills'], 'process')} ran out of memory in the container of {here}"
            + (f" (limit {format_bytes(host['memory_limit'])})." if host["memory_limit"] else "."),
            "use fewer loader workers or a smaller micro-batch, or raise the limit.",
        )
    size, free = host["shm_size"], host["shm_free"]
    wanted = host["local_world_size"] * need.workers * _PREFETCH * need.batch_bytes
    text = f"/dev/shm of {here} has {format_bytes(free)} free of {format_bytes(size)}"
    fix = "docker run --shm-size=8g; in Kubernetes, mount an emptyDir of medium Memory at /dev/shm."
    if wanted > free:
        text = f"{text}; batches of the loaders may need {format_bytes(wanted)}."
        yield Finding("shared memory", "fail", text, fix)
    elif size < _MIN_SHM_BYTES and not wanted:
        text = f"{text}: little for loader workers and NCCL."
        yield Finding("shared memory", "warn", text, fix)
    else:
        yield Finding("shared memory", "ok", f"{text}.")


def _folder(host: Facts, here: str, shared: list[bool] | None) -> Iterator[Finding]:
    folder = host["folder"]
    if folder is None:
        return
    where = f"{folder['path']} on {here}"
    if "error" in folder:
        text = f"{where} cannot be written to: {folder['error']}."
        yield Finding("folder", "fail", text, "choose another folder, or change its permissions.")
    elif shared is not None and not shared[host["rank"]]:
        text = f"{where} does not have the file that rank 0 wrote."
        yield Finding("folder", "fail", text, "put the run folder on storage that all nodes share.")
    else:
        rate = f"{folder['bytes_per_s'] / 1e6:.0f} MB/s"
        text = f"{where}: {format_bytes(folder['free'])} free, {rate} to durable storage"
        if folder["bytes_per_s"] < _MIN_DISK_BYTES_PER_S:
            yield Finding("folder", "warn", f"{text}: slow.", "use a faster disk for checkpoints.")
        else:
            yield Finding("folder", "ok", f"{text}{', shared' if shared else ''}.")


def _name(host: Facts, here: str, used: dict[int, str | None]) -> Iterator[Finding]:
    addresses = host["names"]["addresses"]
    text = f"the name {host['host']} resolves to {', '.join(addresses) or 'nothing'} on {here}"
    # Without GLOO_SOCKET_IFNAME, Gloo listens on the first address and gives it to its peers.
    outside = addresses and not _is_loopback(addresses[0])
    if outside or "GLOO_SOCKET_IFNAME" in host["variables"]:
        yield Finding("host name", "ok", f"{text}.")
        return
    usable = [n for n, found in host["interfaces"].items() if not all(map(_is_loopback, found))]
    interface = used.get(host["rank"])
    if interface not in usable:
        interface = next(iter(usable), "<interface>")
    yield Finding(
        "host name",
        "fail" if used else "warn",
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
            f"port {usual}, torch's usual one, is in use on {here} by {host['port_owner']}.",
            "end that process if an earlier job left it, or use another port.",
        )
    low, high = host["ephemeral_ports"] or (0, 1 << 16)
    if high - low < _MIN_PORTS:
        yield Finding(
            "ports",
            "warn",
            f"{here} has only {high - low} ephemeral ports.",
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
            hosts = f"{names[link['from']]} to {names[link['to']]}"
            yield Finding(
                "network",
                "warn",
                f"{hosts} carries {_rate(link['bytes_per_s'])}, others {_rate(usual)}.",
                "check its cable, port and placement; the slowest link limits every all-reduce.",
            )
    rates = [link["bytes_per_s"] for link in good]
    delays = [link["latency_s"] * 1e3 for link in good]
    over = ", ".join(sorted({str(_interface(link, by_rank[link["from"]])) for link in good}))
    yield Finding(
        "network",
        "ok",
        f"{len(good)} of {len(links)} links between hosts work, {min(delays):.2f} to "
        f"{max(delays):.2f} ms, {_rate(min(rates))} to {_rate(max(rates))}, over {over}.",
    )


def _interface(link: Facts, here: Facts) -> str | None:
    """The interface through which a host reached another one."""
    address = link.get("from_address")
    return next((name for name, found in here["interfaces"].items() if address in found), None)


def _link(link: Facts, here: Facts, there: Facts, names: dict[int, str]) -> Iterator[Finding]:
    a, b = names[link["from"]], names[link["to"]]
    low, high = FIREWALL_PORTS
    for kind, ports in (("ephemeral", "an ephemeral port"), ("fixed", f"{low}-{high}")):
        if link[kind]:
            address = f"{link['endpoint']['address']}:{link['endpoint'][kind]}"
            text = f"{a} cannot reach {b} at {address} ({ports}): {link[kind]}."
            yield Finding("network", "fail", text, "open these ports between the hosts, both ways.")
    if abs(link.get("clock_s", 0)) > _CLOCK_OFFSET_S:
        text = f"the clocks of {a} and {b} differ by {abs(link['clock_s']):.1f} s."
        yield Finding("clock", "warn", text, "run chrony or ntpd on both hosts.")
    known = {address for found in there["interfaces"].values() for address in found}
    if known.isdisjoint(link["resolved"]):
        resolved = ", ".join(link["resolved"]) or "nothing"
        text = f"on {a} the name {there['host']} resolves to {resolved}, which is not an address of {b}."
        yield Finding("host name", "warn", text, "use addresses, or add the name to /etc/hosts.")
    used = _interface(link, here)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = here["variables"].get(variable, "")
        fitting = [name for name in here["interfaces"] if interface_fits(variable, value, name)]
        if used and fitting and used not in fitting:
            yield Finding(
                "network",
                "warn",
                f"{a} reaches {b} through {used}, but {variable}={value}.",
                f"set it to {used}, unless you want the other network.",
            )


def _reduce(facts_of_ranks: list[Facts]) -> Iterator[Finding]:
    on_gpus = [facts["gpu"] for facts in facts_of_ranks if "gpu" in facts]
    for name, each in (("all-reduce", facts_of_ranks), ("all-reduce on GPUs", on_gpus)):
        errors = [facts["error"] for facts in each if "error" in facts]
        if errors:
            known = next((hit for text in errors if (hit := recognise(text))), None)
            text = errors[0].splitlines()[0][:300]
            fix = known.cause.fix if known else "run `paceline explain` on the whole error."
            yield Finding(name, "fail", f"it failed: {text}", fix)
        elif each and not all(facts["right"] for facts in each):
            fix = "check memory, cables and the network driver; test pairs of hosts."
            yield Finding(name, "fail", "the sum is wrong.", fix)
        elif each:
            slowest: Any = max(each, key=lambda facts: facts["seconds"])
            yield Finding(
                name,
                "ok",
                f"{format_bytes(slowest['bytes'])} over {slowest['world_size']} ranks, correct sum, "
                f"{slowest['seconds'] * 1e3:.1f} ms ({_rate(slowest['bytes'] / slowest['seconds'])}).",
            )


def _count(number: int, thing: str) -> str:
    if number == 1:
        return f"{number} {thing}"
    return f"{number} {thing}{'es' if thing.endswith('s') else 's'}"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"
