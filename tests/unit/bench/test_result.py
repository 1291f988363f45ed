from rdt_e2e.bench.result import COLD, END_TO_END, RowResult, Task


def result(**more):
    made = RowResult("ours", 10, **more)
    made.add(COLD, 2.0)
    made.add(END_TO_END, 1.0)
    made.add_part("pack", 0.5)
    return made


def test_task_and_result_survive_json():
    task = Task("ours", "local", {"sync.iters": 2}, ("/a", "/b"), 3, "/out")
    assert Task.from_json(task.to_json()) == task
    made = result(checks={"cold": ""}, facts={"n": 1})
    assert RowResult.from_json(made.to_json()) == made


def test_task_gives_the_configuration_with_its_overrides():
    task = Task("ours", "local", {"sync.iters": 7}, ("/a", "/b"), 3, "/out")
    assert task.config().sync.iters == 7


def test_rounds_are_pooled():
    first, second = result(checks={"cold": ""}), result(checks={"cold": "w13"})
    first.merge(second)
    assert first.seconds == {COLD: [2.0, 2.0], END_TO_END: [1.0, 1.0]}
    assert first.parts == {"pack": [0.5, 0.5]}
    assert first.wrong_weights == ["cold, round 2 or later"]


def test_a_failed_round_does_not_hide_the_others():
    first = result()
    first.merge(RowResult("ours", reason="lost"))
    assert first.reason is None
    assert first.facts["failed_rounds"] == ["lost"]
    lost = RowResult("ours", reason="lost")
    lost.merge(result())
    assert lost.reason is None
    assert lost.seconds[END_TO_END] == [1.0]
    assert lost.facts["failed_rounds"] == ["lost"]
