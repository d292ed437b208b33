"""Memory counters and the quota of cores, as the kernel's control groups give them."""

from __future__ import annotations

from pathlib import Path

from paceline.machine import cgroup_quota, read_memory


def write(folder: Path, **files: str) -> None:
    """Write files of these names; `__` stands for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_counters_of_version_1(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("5:cpu,cpuacct:/a\n4:memory:/job/step\n0::/\n")
    group = tmp_path / "memory" / "job" / "step"
    write(group, memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    write(group, memory__limit_in_bytes="9223372036854771712\n")
    write(group, memory__max_usage_in_bytes="1073741824\n")
    write(group.parent, memory__limit_in_bytes="2147483648\n", memory__oom_control="oom_kill 9\n")
    found = read_memory(tmp_path / "cgroup", tmp_path)
    assert (found.kills, found.limit_bytes, found.peak_bytes) == (3, 2 << 30, 1 << 30)


def test_counters_of_version_2(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/job\n")
    write(tmp_path / "job", memory__events="low 0\noom 4\noom_kill 2\n", memory__max="max\n")
    write(tmp_path / "job", memory__peak="524288000\n")
    found = read_memory(tmp_path / "cgroup", tmp_path)
    assert (found.kills, found.limit_bytes, found.peak_bytes) == (2, None, 524288000)


def test_a_machine_without_counters(tmp_path: Path) -> None:
    assert read_memory(tmp_path / "none", tmp_path).kills is None


def test_quota_of_version_2_counts_on_each_level(tmp_path: Path) -> None:
    member, mount = tmp_path / "cgroup", tmp_path / "mount"
    member.write_text("0::/pod/box\n")
    assert cgroup_quota(member, mount) is None
    write(mount / "pod/box", cpu__max="max 100000\n")
    assert cgroup_quota(member, mount) is None
    write(mount / "pod", cpu__max="250000 100000\n")
    assert cgroup_quota(member, mount) == 2.5


def test_quota_of_version_1(tmp_path: Path) -> None:
    member, mount = tmp_path / "cgroup", tmp_path / "mount"
    member.write_text("4:cpu,cpuacct:/docker/x\n3:memory:/y\n0::/\n")
    group = mount / "cpu,cpuacct"
    write(group, cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    assert cgroup_quota(member, mount) is None
    write(group, cpu__cfs_quota_us="150000\n")
    assert cgroup_quota(member, mount) == 1.5
