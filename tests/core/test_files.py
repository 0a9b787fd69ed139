"""Files that are whole or not there, and what a failure in between leaves."""

import pytest

from training.storage.files import beside_of, whole_file, write_whole


@pytest.mark.parametrize("error", [OSError("no room"), ValueError("no tensor"), KeyboardInterrupt()])
def test_a_failure_while_a_file_is_written_leaves_the_one_before_and_nothing_beside_it(tmp_path, error):
    path = tmp_path / "a.bin"
    path.write_bytes(b"before")
    with pytest.raises(type(error)), whole_file(path) as beside:
        beside.write_bytes(b"half")
        assert path.read_bytes() == b"before"
        raise error
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", ["\u6587\n", b"\x00\xff"])
def test_a_file_takes_its_name_when_it_is_whole(tmp_path, content):
    path = tmp_path / "a.json"
    for _ in range(2):
        write_whole(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_of_one_file_do_not_write_into_each_other(tmp_path):
    path = tmp_path / "a.bin"
    assert beside_of(path, ".1") != beside_of(path, ".2")
    with whole_file(path, mark=".1") as one:
        one.write_bytes(b"one")
        with whole_file(path, mark=".2", sync=False) as other:
            other.write_bytes(b"other")
        assert path.read_bytes() == b"other"
    assert path.read_bytes() == b"one" and list(tmp_path.iterdir()) == [path]
