"""Judge variables of NCCL, Gloo, OpenMP and CUDA against the machine. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.doctor.facts import Facts

# Any value but 0 costs speed. They often remain set after debugging.
_COSTLY = {
    "NCCL_P2P_DISABLE": "GPUs of one host communicate through the host's memory",
    "NCCL_SHM_DISABLE": "ranks of one host communicate through the network",
    "CUDA_LAUNCH_BLOCKING": "the CPU waits for each kernel",
}


def judge_variables(host: Facts, *, several_hosts: bool) -> Iterator[tuple[str, str]]:
    """Problems with the variables of a host's first rank, each with its fix."""
    variables: dict[str, str] = host["variables"]
    names = list(host["interfaces"])
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = variables.get(variable)
        if value and not any(interface_fits(variable, value, name) for name in names):
            fix = f"name one of {', '.join(names)}, or unset it."
            yield f"{variable}={value} matches no interface.", fix
        elif value == "lo" and several_hosts:
            fix = "name the interface that reaches the other hosts."
            yield f"{variable}=lo cannot reach other hosts.", fix
    for variable, cost in _COSTLY.items():
        if variables.get(variable, "0") not in ("", "0"):
            yield f"{variable}={variables[variable]}: {cost}.", "unset it unless it is needed."
    if variables.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL":
        yield (
            "TORCH_DISTRIBUTED_DEBUG=DETAIL adds a check to each collective, which costs speed.",
            "unset it after debugging.",
        )
    if variables.get("NCCL_IB_DISABLE", "0") not in ("", "0") and host["infiniband"]:
        yield (
            f"NCCL_IB_DISABLE={variables['NCCL_IB_DISABLE']} leaves "
            f"{', '.join(host['infiniband'])} unused.",
            "unset it.",
        )
    threads = variables.get("OMP_NUM_THREADS", "")
    share = max(1, host["cores"] // host["local_world_size"])
    if threads.isdigit() and int(threads) > share:
        yield (
            f"OMP_NUM_THREADS={threads}, while {host['cores']} cores are usable for "
            f"{host['local_world_size']} ranks.",
            f"set it to {share}, or leave it to `paceline run`.",
        )
    shown = variables.get("CUDA_VISIBLE_DEVICES", "")
    listed = [word for word in shown.split(",") if word.strip()]
    if len(listed) > host["gpus"]:
        yield (
            f"CUDA_VISIBLE_DEVICES={shown} lists {len(listed)} GPUs, torch sees {host['gpus']}.",
            "list GPUs that `nvidia-smi -L` shows, each once.",
        )


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
