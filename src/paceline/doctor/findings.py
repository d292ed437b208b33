"""Judge facts: each finding is ok, warn or fail, with one sentence and one fix. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.doctor.facts import Facts
from paceline.doctor.variables import interface_fits, judge_variables
from paceline.explain.reading import recognise
from paceline.job.environment import FIREWALL_PORTS
from paceline.job.network import is_loopback
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


def _ok(name: str, what: str) -> Finding:
    return Finding(name, "ok", what)


def _warn(name: str, what: str, fix: str) -> Finding:
    return Finding(name, "warn", what, fix)


def _fail(name: str, what: str, fix: str) -> Finding:
    return Finding(name, "fail", what, fix)


@dataclass(frozen=True, kw_only=True)
class Need:
    """What the job will need: loader workers of each rank, and the size of a batch in bytes."""

    workers: int = 0
    batch_bytes: int = 0


def judge(found: Facts, need: Need) -> list[Finding]:
    """All findings on the facts of `session.examine`: host by host, then between hosts."""
    # By the first rank of each host, as `from` and `to` of a link.
    hosts: dict[int, Facts] = {f["rank"]: f for f in found["ranks"] if f["local_rank"] == 0}
    labels = _labels(hosts)
    interfaces = {link["from"]: _interface(link, hosts[link["from"]]) for link in found["links"]}
    findings = [*_versions(hosts, labels)]
    for first, host in hosts.items():
        label, end = labels[first], first + host["local_world_size"]
        devices = [f["device"] for f in found["ranks"] if first <= f["rank"] < end]
        findings += [
            *_devices(host, label, devices),
            *_cores(host, label, need),
            *_memory(host, label),
            *_shared_memory(host, label, need),
            *_folder(host, label, found["shared"]),
            *_host_name(host, label, interfaces),
            *_ports(host, label),
        ]
        for what, fix in judge_variables(host, several_hosts=len(hosts) > 1):
            findings.append(_warn("variables", f"{label}: {what}", fix))
    for link in found["links"]:
        findings += _link(link, hosts, labels)
    return [*findings, *_network(found["links"], hosts, labels), *_reduce(found["reduce"])]


def render(findings: Sequence[Finding]) -> str:
    """The report: failures first; of several ok findings on one subject only the first."""
    lines = []
    for finding in sorted(findings, key=lambda f: ("fail", "warn", "ok").index(f.level)):
        alike = [f for f in findings if (f.level, f.name) == ("ok", finding.name)]
        if finding in alike[1:]:
            continue
        more = f" (and {len(alike) - 1} more)" if alike[1:] and finding is alike[0] else ""
        lines.append(f"{finding.level:<5} {finding.name}: {finding.what}{more}")
        if finding.fix:
            lines.append(f"      fix: {finding.fix}")
    return "\n".join(lines)


def _labels(hosts: dict[int, Facts]) -> dict[int, str]:
    """How messages name each host; containers often have equal host names."""
    names = [host["host"] for host in hosts.values()]
    return {
        rank: host["host"] if names.count(host["host"]) == 1 else f"{host['host']} (rank {rank})"
        for rank, host in hosts.items()
    }


def _versions(hosts: dict[int, Facts], labels: dict[int, str]) -> Iterator[Finding]:
    first, *others = (host["versions"] for host in hosts.values())
    for key in first:
        versions = {labels[rank]: host["versions"][key] for rank, host in hosts.items()}
        if len(set(versions.values())) > 1:
            text = ", ".join(f"{version} on {label}" for label, version in versions.items())
            judged = _warn if key in _MAY_DIFFER else _fail
            yield judged(
                "versions", f"{key} differs: {text}.", f"install the same {key} on all hosts."
            )
    if all(versions == first for versions in others):
        text = ", ".join(f"{key} {version}" for key, version in first.items() if version != "none")
        yield _ok("versions", f"{text}, on {_count(len(hosts), 'host')}.")


def _devices(host: Facts, label: str, of_ranks: Sequence[Facts | None]) -> Iterator[Finding]:
    devices = [device for device in of_ranks if device is not None]
    if not devices:
        yield _ok("devices", f"{label} has no GPU; ranks compute on its CPU.")
        return
    present = [device for device in devices if not device["missing"]]
    if len(present) < len(devices):
        yield _fail(
            "devices",
            f"{label} shows {_count(host['gpus'], 'GPU')} to {len(of_ranks)} ranks.",
            "start one rank per GPU, or ask the scheduler for more.",
        )
    if len({device["uuid"] for device in present}) < len(present):
        yield _fail(
            "devices",
            f"ranks of {label} share a GPU.",
            "let the scheduler show all GPUs of the node to each rank, or a different one to each.",
        )
    busy = [device for device in present if device["used"] > 0.1 * device["total"]]
    if busy:
        used = format_bytes(busy[0]["used"])
        yield _warn(
            "devices",
            f"GPU {busy[0]['index']} of {label} has {used} in use already.",
            "find the process with `nvidia-smi`; end it if an earlier job left it.",
        )
    elif len(present) == len(devices):
        yield _ok("devices", f"{label}: {host['gpus']} x {present[0]['name']}.")


def _cores(host: Facts, label: str, need: Need) -> Iterator[Finding]:
    cores, ranks = host["cores"], host["local_world_size"]
    usable = f"{_count(cores, 'usable core')} of {host['cores_of_host']}"
    text = f"{label} has {usable} for {_count(ranks, 'rank')}"
    if ranks * (1 + need.workers) <= cores:
        yield _ok("cores", f"{text}.")
        return
    workers = f" with {_count(need.workers, 'loader worker')} each" if need.workers else ""
    yield _warn(
        "cores",
        f"{text}{workers}.",
        "use fewer ranks or workers, or ask the scheduler for more cores (--cpus-per-task).",
    )


def _memory(host: Facts, label: str) -> Iterator[Finding]:
    if host["memory_kills"]:
        limit = host["memory_limit"]
        yield _warn(
            "memory",
            f"{_count(host['memory_kills'], 'process')} ran out of memory in the container of {label}"
            + (f" (limit {format_bytes(limit)})." if limit else "."),
            "use fewer loader workers or a smaller micro-batch, or raise the limit.",
        )


def _shared_memory(host: Facts, label: str, need: Need) -> Iterator[Finding]:
    size, free = host["shm_size"], host["shm_free"]
    wanted = host["local_world_size"] * need.workers * _PREFETCH * need.batch_bytes
    text = f"/dev/shm of {label} has {format_bytes(free)} free of {format_bytes(size)}"
    fix = "docker run --shm-size=8g; in Kubernetes, mount an emptyDir of medium Memory at /dev/shm."
    if wanted > free:
        text = f"{text}; batches of the loaders may need {format_bytes(wanted)}."
        yield _fail("shared memory", text, fix)
    elif size < _MIN_SHM_BYTES and not wanted:
        yield _warn("shared memory", f"{text}: little for loader workers and NCCL.", fix)
    else:
        yield _ok("shared memory", f"{text}.")


def _folder(host: Facts, label: str, shared: list[bool] | None) -> Iterator[Finding]:
    folder = host["folder"]
    if folder is None:
        return
    where = f"{folder['path']} on {label}"
    if "error" in folder:
        text = f"{where} cannot be written to: {folder['error']}."
        yield _fail("folder", text, "choose another folder, or change its permissions.")
    elif shared is not None and not shared[host["rank"]]:
        text = f"{where} does not have the file that rank 0 wrote."
        yield _fail("folder", text, "put the run folder on storage that all nodes share.")
    else:
        rate = f"{folder['bytes_per_s'] / 1e6:.0f} MB/s"
        text = f"{where}: {format_bytes(folder['free'])} free, {rate} to durable storage"
        if folder["bytes_per_s"] < _MIN_DISK_BYTES_PER_S:
            yield _warn("folder", f"{text}: slow.", "use a faster disk for checkpoints.")
        else:
            yield _ok("folder", f"{text}{', shared' if shared else ''}.")


def _host_name(host: Facts, label: str, interfaces: dict[int, str | None]) -> Iterator[Finding]:
    """Whether other hosts can reach the address that this host's name resolves to.

    Args:
        interfaces: by first rank, the interface through which each host reaches others; {} for one host.
    """
    addresses = host["addresses"]
    text = f"the name {host['host']} resolves to {', '.join(addresses) or 'nothing'} on {label}"
    # Without GLOO_SOCKET_IFNAME, Gloo listens on the first address and gives it to its peers.
    reachable = addresses and not is_loopback(addresses[0])
    if reachable or "GLOO_SOCKET_IFNAME" in host["variables"]:
        yield _ok("host name", f"{text}.")
        return
    usable = [n for n, found in host["interfaces"].items() if not all(map(is_loopback, found))]
    interface = interfaces.get(host["rank"])
    if interface not in usable:
        interface = next(iter(usable), "<interface>")
    judged = _fail if interfaces else _warn
    yield judged(
        "host name",
        f"{text}; over several hosts Gloo would connect to itself.",
        f"set GLOO_SOCKET_IFNAME={interface}, or correct /etc/hosts.",
    )


def _ports(host: Facts, label: str) -> Iterator[Finding]:
    usual = FIREWALL_PORTS[0]
    if host["port_owner"] and host["variables"].get("MASTER_PORT") != str(usual):
        yield _warn(
            "ports",
            f"port {usual}, torch's usual one, is in use on {label} by {host['port_owner']}.",
            "end that process if an earlier job left it, or use another port.",
        )
    low, high = host["ephemeral_ports"] or (0, 1 << 16)
    if high - low < _MIN_PORTS:
        yield _warn(
            "ports",
            f"{label} has only {high - low} ephemeral ports.",
            "sysctl net.ipv4.ip_local_port_range='32768 60999'.",
        )


def _interface(link: Facts, here: Facts) -> str | None:
    """The interface through which the host of facts `here` reached the other one."""
    address = link.get("from_address")
    return next((name for name, found in here["interfaces"].items() if address in found), None)


def _link(link: Facts, hosts: dict[int, Facts], labels: dict[int, str]) -> Iterator[Finding]:
    here, there = hosts[link["from"]], hosts[link["to"]]
    a, b = labels[link["from"]], labels[link["to"]]
    low, high = FIREWALL_PORTS
    for kind, ports in (("ephemeral", "an ephemeral port"), ("fixed", f"{low}-{high}")):
        if link[kind]:
            address = f"{link['endpoint']['address']}:{link['endpoint'][kind]}"
            text = f"{a} cannot reach {b} at {address} ({ports}): {link[kind]}."
            yield _fail("network", text, "open these ports between the hosts, both ways.")
    offset_s = abs(link.get("clock_s", 0))
    if offset_s > _CLOCK_OFFSET_S:
        text = f"the clocks of {a} and {b} differ by {offset_s:.1f} s."
        yield _warn("clock", text, "run chrony or ntpd on both hosts.")
    known = {address for found in there["interfaces"].values() for address in found}
    if known.isdisjoint(link["resolved"]):
        resolved = ", ".join(link["resolved"]) or "nothing"
        text = f"on {a} the name {there['host']} resolves to {resolved}, which is not an address of {b}."
        yield _warn("host name", text, "use addresses, or add the name to /etc/hosts.")
    used = _interface(link, here)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = here["variables"].get(variable, "")
        fitting = [name for name in here["interfaces"] if interface_fits(variable, value, name)]
        if used and fitting and used not in fitting:
            text = f"{a} reaches {b} through {used}, but {variable}={value}."
            yield _warn("network", text, f"set it to {used}, unless you want the other network.")


def _network(
    links: list[Facts], hosts: dict[int, Facts], labels: dict[int, str]
) -> Iterator[Finding]:
    """Compare the links that work."""
    working = [link for link in links if link["ephemeral"] == ""]
    if not working:
        return
    rates = [link["bytes_per_s"] for link in working]
    usual = statistics.median(rates)
    for link in working if len(working) > 2 else ():
        if link["bytes_per_s"] < usual / _SLOWER:
            yield _warn(
                "network",
                f"{labels[link['from']]} to {labels[link['to']]} carries "
                f"{_rate(link['bytes_per_s'])}, others {_rate(usual)}.",
                "check its cable, port and placement; the slowest link limits every all-reduce.",
            )
    delays = [link["latency_s"] * 1e3 for link in working]
    over = ", ".join(sorted({str(_interface(link, hosts[link["from"]])) for link in working}))
    yield _ok(
        "network",
        f"{len(working)} of {len(links)} links between hosts work, {min(delays):.2f} to "
        f"{max(delays):.2f} ms, {_rate(min(rates))} to {_rate(max(rates))}, over {over}.",
    )


def _reduce(facts_of_ranks: list[Facts]) -> Iterator[Finding]:
    on_gpus = [facts["gpu"] for facts in facts_of_ranks if "gpu" in facts]
    for name, results in (("all-reduce", facts_of_ranks), ("all-reduce on GPUs", on_gpus)):
        errors = [result["error"] for result in results if "error" in result]
        if errors:
            known = next((hit for text in errors if (hit := recognise(text))), None)
            text = errors[0].splitlines()[0][:300]
            fix = known.cause.fix if known else "run `paceline explain` on the whole error."
            yield _fail(name, f"it failed: {text}", fix)
        elif results and not all(result["right"] for result in results):
            fix = "check memory, cables and the network driver; test pairs of hosts."
            yield _fail(name, "the sum is wrong.", fix)
        elif results:
            slowest: Any = max(results, key=lambda result: result["seconds"])
            size_bytes, seconds = slowest["bytes"], slowest["seconds"]
            yield _ok(
                name,
                f"{format_bytes(size_bytes)} over {slowest['world_size']} ranks, correct sum, "
                f"{seconds * 1e3:.1f} ms ({_rate(size_bytes / seconds)}).",
            )


def _count(number: int, thing: str) -> str:
    if number == 1:
        return f"{number} {thing}"
    return f"{number} {thing}{'es' if thing.endswith('s') else 's'}"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"
