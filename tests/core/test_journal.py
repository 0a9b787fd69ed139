"""The run's diary: after a resume it reads like one uninterrupted run."""

import json

import pytest

from training.run.report.journal import Journal, read


def write(folder, first, last, resume=0):
    journal = Journal(folder, resume)
    for step in range(first, last + 1):
        journal.write(step, loss=1 / step)
    journal.close()
    return journal


def steps(folder):
    return [line["step"] for line in read(folder / "metrics.jsonl")]


def test_a_line_is_on_the_disk_as_soon_as_it_is_written(tmp_path):
    journal = Journal(tmp_path, 0)
    journal.write(1, loss=0.5, learning_rate=1e-4)
    assert read(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 0.5, "learning_rate": 1e-4}]
    journal.close()


def test_a_resume_drops_the_lines_after_its_step(tmp_path):
    write(tmp_path, 1, 9)
    journal = write(tmp_path, 6, 7, resume=5)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    assert journal.series("loss") == ([1, 2, 3, 4, 5, 6, 7], [1 / k for k in range(1, 8)])


def test_a_start_from_nothing_drops_every_line(tmp_path):
    write(tmp_path, 1, 9)
    write(tmp_path, 1, 2, resume=0)
    assert steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_last_line_cut_by_a_kill_is_left_out_and_written_over(tmp_path, cut):
    write(tmp_path, 1, 5)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-cut] if cut > 1 else path.read_text() + '{"step": 6, "lo')
    write(tmp_path, 6, 7, resume=4)
    lines = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 6, 7]


def test_quantities_that_come_now_and_then_have_their_own_steps(tmp_path):
    journal = Journal(tmp_path, 0)
    for step in range(1, 5):
        journal.write(step, loss=step * 1.0)
        if step % 2 == 0:
            journal.write(step, **{"validation/loss": step * 10.0})
    journal.close()
    assert journal.series("validation/loss") == ([2, 4], [20.0, 40.0])
    assert journal.series("loss")[0] == [1, 2, 3, 4] and journal.series("nothing") == ([], [])


def test_tensorboard_reads_the_same_numbers_and_drops_the_same_steps(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, 1, 9)
    write(tmp_path, 6, 7, resume=5)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6, 7]
    assert events.Scalars("loss")[3].value == pytest.approx(0.25)
