"""Main memory inside a container: what its control groups leave, in trees as the kernel shows them."""

import pytest

from training.errors import BadInput
from training.memory.machine import GIB, Container, Machine, container, planned_machine

MACHINE = Machine(48 * GIB, 64 * GIB, False, "the main memory")


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def asked(tmp_path, groups):
    file = tmp_path / "cgroup"
    file.write_text(groups)
    return container(file, tmp_path / "tree")


def test_version_2_from_inside_a_container(tmp_path):
    stat = f"anon {GIB}\ninactive_file {GIB}\nslab 5"
    write(tmp_path / "tree", memory__max=8 * GIB, memory__current=3 * GIB, memory__stat=stat)
    # the group is the root of what can be seen, whatever it is called outside
    for groups in ("0::/\n", "0::/docker/0123abc\n", "0::/../../kubepods/pod1\n"):
        assert asked(tmp_path, groups) == Container(8 * GIB, 6 * GIB)


def test_version_2_the_tightest_group_above_counts(tmp_path):
    tree = tmp_path / "tree"
    write(tree, cgroup__procs="")  # the machine's own root has no limit
    write(tree / "user.slice", memory__max=6 * GIB, memory__current=5 * GIB, memory__stat="anon 1")
    write(tree / "user.slice/job", memory__max="max", memory__current=GIB, memory__stat="anon 1")
    assert asked(tmp_path, "0::/user.slice/job\n") == Container(6 * GIB, GIB)
    assert asked(tmp_path, "0::/other\n") is None


@pytest.mark.parametrize("path", ["/docker/0123abc", "/"])
def test_version_1(tmp_path, path):
    group = tmp_path / "tree/memory" / path.strip("/")
    write(
        group, memory__limit_in_bytes=4 * GIB, memory__usage_in_bytes=3 * GIB,
        memory__stat=f"inactive_file 7\ntotal_inactive_file {GIB}",
    )  # fmt: skip
    if path != "/":  # the machine's root: none
        write(tmp_path / "tree/memory", memory__limit_in_bytes=0x7FFFFFFFFFFFF000, memory__usage_in_bytes=GIB)
    assert asked(tmp_path, f"12:cpu,cpuacct:/x\n4:memory:{path}\n0::/x\n") == Container(4 * GIB, 2 * GIB)


def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path):
    write(tmp_path / "tree", memory__max=GIB, memory__current=2 * GIB, memory__stat="anon 1")
    assert asked(tmp_path, "0::/\n") == Container(GIB, 0)


@pytest.mark.parametrize("groups", ["", "nonsense\n", "0::\n", "4:memory\n"])
def test_what_cannot_be_read_is_no_limit(tmp_path, groups):
    assert asked(tmp_path, groups) is None
    write(tmp_path / "tree", memory__max="many", memory__current=1, memory__stat="")
    assert asked(tmp_path, "0::/\n") is None
    assert container(tmp_path / "not there", tmp_path / "tree") is None


def test_a_machine_inside_a_container_says_so_and_keeps_what_the_host_believes():
    inside = MACHINE.inside(Container(8 * GIB, 6 * GIB))
    assert (inside.free, inside.total, inside.believed) == (6 * GIB, 8 * GIB, 48 * GIB)
    assert inside.where.endswith("of which this container may use 8 GiB")
    assert inside.with_more(GIB).free == 7 * GIB and inside.with_more(GIB).believed == 49 * GIB
    assert MACHINE.inside(None) is MACHINE and MACHINE.inside(Container(64 * GIB, 63 * GIB)) is MACHINE
    assert MACHINE.believed == MACHINE.free


@pytest.mark.parametrize("gib", [float("nan"), float("inf"), float("-inf"), -1, 0.0, 10**400, -(10**400), 2**21])
def test_what_is_no_amount_of_memory_is_refused_by_name(gib):
    with pytest.raises(BadInput, match="^memory_gib: expected GiB above 0 and up to 1048576, got ") as refused:
        planned_machine(gib)
    assert len(str(refused.value)) < 100
