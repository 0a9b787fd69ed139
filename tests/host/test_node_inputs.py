"""Saved workflows hold values by position: ids, order and types of inputs are for ever, and new ones go to the end."""

import copy

from tests.host.node_inputs import broken_promises, of_nodes, promised
from tests.host.server import PACK_NAME


def test_inputs_and_outputs_are_those_that_were_promised(host):
    now = of_nodes(host.object_info(), PACK_NAME)
    assert broken_promises(promised(), now) == []
    assert now == promised(), "a node has grown: run dev/write_node_inputs.py, which writes the promise anew"


def test_what_would_move_the_values_of_a_saved_workflow_is_a_broken_promise():
    promise, node = promised(), "Ref2VEstimateTrainingMemory"

    def after(change):
        now = copy.deepcopy(promise)
        change(now)
        return broken_promises(promise, now)

    assert after(lambda now: now[node]["optional"].append(["later", "INT"])) == []
    assert after(lambda now: now.update(Ref2VNew=now[node])) == []
    assert after(lambda now: now[node]["optional"].insert(0, ["first", "INT"]))
    assert after(lambda now: now[node]["required"].append(["asked", "INT"]))  # before the optional ones, and asked for
    assert after(lambda now: now[node]["required"].reverse())
    assert after(lambda now: now[node]["outputs"].insert(0, "INT"))
    assert after(lambda now: now.pop(node))
