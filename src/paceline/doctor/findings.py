"""Judge facts: each finding is ok, warn or fail, with one sentence and one fix. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.doctor.examine import Facts
from paceline.errors import count_of
from paceline.explain.reading import recognise
from paceline.job.environment import FIREWALL_PORTS
from paceline.job.network import is_loopback
from paceline.machine import format_bytes

_MIN_SHM_BYTES = 1 << 30  # less is little for loader workers and NCCL
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
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


def judge(found: Facts) -> list[Finding]:
    """All findings on the facts of `examine`: host by host, then between hosts."""
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
            *_shared_memory(host, label),
            *_host_name(host, label, interfaces),
            *_variables(host, label, is_alone=len(hosts) == 1),
        ]
    for link in found["links"]:
        findings += _link(link, hosts, labels)
    if found["links"] and not any(finding.name == "network" for finding in findings):
        names = ", ".join(sorted({str(interface) for interface in interfaces.values()}))
        links = count_of(len(found["links"]), "link")
        findings.append(_ok("network", f"{links} between hosts work, over {names}."))
    return [*findings, *_reduce(found["reduce"])]


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
        yield _ok("versions", f"{text}, on {count_of(len(hosts), 'host')}.")


def _devices(host: Facts, label: str, of_ranks: Sequence[Facts | None]) -> Iterator[Finding]:
    devices = [device for device in of_ranks if device is not None]
    if not devices:
        yield _ok("devices", f"{label} has no GPU; ranks compute on its CPU.")
        return
    present = [device for device in devices if not device["missing"]]
    failed = [device for device in devices if "error" in device]
    for device in failed:
        yield _fail(
            "devices",
            f"GPU {device['index']} of {label} cannot be used: {device['error']}",
            "see `nvidia-smi` there: another process may use it alone, or it needs a reset.",
        )
    if len(present) + len(failed) < len(devices):
        yield _fail(
            "devices",
            f"{label} shows {count_of(host['gpus'], 'GPU')} to {len(of_ranks)} ranks.",
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


def _shared_memory(host: Facts, label: str) -> Iterator[Finding]:
    size, free = host["shm_size"], host["shm_free"]
    text = f"/dev/shm of {label} has {format_bytes(free)} free of {format_bytes(size)}"
    if size < _MIN_SHM_BYTES:
        yield _warn(
            "shared memory",
            f"{text}: little for loader workers and NCCL.",
            "docker run --shm-size=8g; in Kubernetes, mount an emptyDir of medium Memory at /dev/shm.",
        )
    else:
        yield _ok("shared memory", f"{text}.")


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


def _variables(host: Facts, label: str, *, is_alone: bool) -> Iterator[Finding]:
    """Whether GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name an interface of this host."""
    names = list(host["interfaces"])
    for variable in _INTERFACE_VARIABLES:
        value = host["variables"].get(variable)
        if value and not any(interface_fits(variable, value, name) for name in names):
            fix = f"name one of {', '.join(names)}, or unset it."
            yield _fail("interface", f"{label}: {variable}={value} matches no interface.", fix)
        elif value == "lo" and not is_alone:
            fix = "name the interface that reaches the other hosts."
            yield _fail("interface", f"{label}: {variable}=lo cannot reach other hosts.", fix)


def interface_fits(variable: str, value: str, name: str) -> bool:
    """Whether the variable selects an interface: Gloo takes names, NCCL prefixes of names.

    For NCCL, a leading `=` means whole names, and `^` excludes.
    """
    if variable.startswith("GLOO"):
        return name in value.split(",")
    excludes, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    words = value.lstrip("^").lstrip("=").split(",")
    # An alias or a port may follow the name.
    plain = [word.partition(":")[0] for word in words]
    hit = name in plain if exact else name.startswith(tuple(filter(None, plain)))
    return hit != excludes


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
    known = {address for found in there["interfaces"].values() for address in found}
    if known.isdisjoint(link["resolved"]):
        resolved = ", ".join(link["resolved"]) or "nothing"
        text = f"on {a} the name {there['host']} resolves to {resolved}, which is not an address of {b}."
        yield _warn("host name", text, "use addresses, or add the name to /etc/hosts.")
    used = _interface(link, here)
    for variable in _INTERFACE_VARIABLES:
        value = here["variables"].get(variable, "")
        fitting = [name for name in here["interfaces"] if interface_fits(variable, value, name)]
        if used and fitting and used not in fitting:
            text = f"{a} reaches {b} through {used}, but {variable}={value}."
            yield _warn("interface", text, f"set it to {used}, unless you want the other network.")


def _reduce(facts_of_ranks: list[Facts]) -> Iterator[Finding]:
    on_gpus = [facts["gpu"] for facts in facts_of_ranks if "gpu" in facts]
    for name, results in (("all-reduce", facts_of_ranks), ("all-reduce on GPUs", on_gpus)):
        errors = [result["error"] for result in results if "error" in result]
        if errors:
            known = next((hit for text in errors if (hit := recognise(text))), None)
            text = errors[0].partition("\n")[0][:300]
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


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"
