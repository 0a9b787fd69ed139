"""What a node says, in a browser and in two front ends: of itself, and of its run in both ways of drawing nodes."""

import json
import subprocess
import time

import pytest

from tests.host.browser import HOW_TO_INSTALL, find_chromium, front_end, newest_front_end
from tests.host.conftest import STATE
from tests.host.server import PACK_NAME, HostServer

pytestmark = [pytest.mark.skipif(find_chromium() is None, reason=HOW_TO_INSTALL), pytest.mark.server]

NODE = 1
ATTENTION = {
    "preset": "SD1.5", "size": "768x768", "width": 768, "height": 768, "batch_size": 1, "frames": 1, "dtype": "bf16",
    "backend": "basic", "cfg": True, "text_tokens": 0, "memory_gib": 8,
}  # fmt: skip
GRAPH = {str(NODE): {"class_type": "Ref2VEstimateAttentionMemory", "inputs": ATTENTION}}

PUT_IN_SIGHT = """
() => { app.canvas.ds.scale = 1; app.canvas.ds.offset = [200, 100]; app.graph.setDirtyCanvas(true, true) }
"""
TEXT = f"app.graph.getNodeById({NODE}).widgets.find(widget => widget.name === 'ref2v_text').value"
SAVED = "JSON.stringify(app.graph.serialize())"
EXPORTED = "async () => JSON.stringify((await app.graphToPrompt()).output)"
LOOKS = """
box => {
    const style = getComputedStyle(box)
    const row = [...box.children].find(line => line.textContent.startsWith('| self, full'))
    return {
        font: style.fontFamily, scrolls: style.overflowY, more: box.scrollHeight > box.clientHeight,
        row: getComputedStyle(row).whiteSpace, fences: box.textContent.includes('```'),
    }
}
"""

# A node on the screen, and the point of its title; what a node says of itself, in the shape of /object_info.
TITLE_IN_SIGHT = """
type => {
    const node = LiteGraph.createNode(type)
    app.graph.clear()
    app.graph.add(node)
    node.pos = [0, 0]
    app.canvas.ds.scale = 1
    app.canvas.ds.offset = [300, 200]
    app.graph.setDirtyCanvas(true, true)
    const box = app.canvas.canvas.getBoundingClientRect()
    return [box.left + 390, box.top + 185]
}
"""
WORDS = """
type => {
    const node = LiteGraph.createNode(type), said = node.constructor.nodeData
    const label = slot => slot.label ?? slot.localized_name ?? slot.name
    return {
        title: node.title,
        description: said.description,
        inputs: Object.values(said.inputs).map(input => [input.name, input.tooltip]),
        labels: [...node.inputs ?? [], ...node.widgets ?? []].map(label),
        outputs: node.outputs.map((slot, i) => [label(slot), said.outputs[i].tooltip]),
    }
}
"""


@pytest.fixture(scope="module")
def newest(host_path):
    try:
        files = newest_front_end(STATE)
    except (OSError, subprocess.SubprocessError) as problem:
        pytest.skip(f"The newest front end could not be fetched: {problem}")
    with HostServer(host_path, args=("--front-end-root", str(files))) as server:
        yield server


def run(page, host, gibibytes: int) -> str:
    """Set memory_gib, press Run; the text on the node once it speaks of that, which is what the queue has, too."""
    page.evaluate(f"app.graph.getNodeById({NODE}).widgets.find(w => w.name === 'memory_gib').value = {gibibytes}")
    page.get_by_role("button", name="Run", exact=True).click()
    page.wait_for_function(f"() => {TEXT}.includes('an empty GPU of {gibibytes} GiB')")
    text = page.evaluate(TEXT)
    until = time.monotonic() + 30  # a prompt is in the history only when it has ended
    while [text] not in said_by_the_queue(host):  # ui.text, for clients of the API
        assert time.monotonic() < until, f"{text!r} is in none of the prompts of the history"
        time.sleep(0.2)
    return text


def said_by_the_queue(host) -> list:
    outputs = [entry["outputs"].get(str(NODE), {}) for entry in host.get("/history").values()]  # of other tests too
    return [output.get("text") for output in outputs]


@pytest.mark.parametrize("nodes_2", [False, True], ids=["canvas", "nodes 2.0"])
@pytest.mark.parametrize("which", ["host", "newest"])
def test_what_a_node_says_stands_on_it(request, which, nodes_2):
    host = request.getfixturevalue(which)
    with front_end(host, nodes_2=nodes_2) as page:
        errors = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.evaluate("async graph => { await app.loadApiJson(graph, 'text') }", GRAPH)
        page.evaluate(PUT_IN_SIGHT)
        assert bool(page.evaluate("LiteGraph.vueNodesMode")) == nodes_2
        before = json.loads(page.evaluate(SAVED))["nodes"][0]["widgets_values"]

        first = run(page, host, 8)
        box = page.locator("pre").filter(has_text="Verdict: fits")
        box.wait_for()
        place = box.bounding_box()
        assert place["height"] > 100 and place["width"] > 150
        looks = box.evaluate(LOOKS)
        assert "monospace" in looks.pop("font")
        assert looks == {"scrolls": "auto", "more": True, "row": "pre", "fences": False}

        assert run(page, host, 16) != first
        assert page.locator("pre").filter(has_text="Verdict: fits").count() == 1

        # neither a saved workflow nor the prompt knows of it, and a workflow that is opened again runs again
        saved = page.evaluate(SAVED)
        assert json.loads(saved)["nodes"][0]["widgets_values"] == [*before[:-1], 16]
        assert json.loads(page.evaluate(EXPORTED))[str(NODE)]["inputs"] == {**ATTENTION, "memory_gib": 16}
        page.evaluate("async saved => { await app.loadGraphData(JSON.parse(saved), true, true, 'again') }", saved)
        page.wait_for_timeout(300)
        assert page.evaluate(TEXT) == ""
        run(page, host, 24)
        assert errors == []


@pytest.mark.parametrize(("which", "language"), [("host", "en-US"), ("newest", "fr-FR")])
def test_where_no_file_has_a_text_the_front_end_reads_it_from_the_schema(request, which, language):
    """locales/en has the names of nodes alone, and none of another language but Chinese."""
    host = request.getfixturevalue(which)
    ours = {name: node for name, node in host.object_info().items() if PACK_NAME in node["python_module"]}
    with front_end(host, locale=language) as page:
        for name, node in ours.items():
            words = page.evaluate(WORDS, name)
            asked = {**node["input"].get("required", {}), **node["input"].get("optional", {})}
            inputs = [(key, spec[1]["tooltip"]) for key, spec in asked.items()]
            outputs = zip(node["output_name"], node["output_tooltips"], strict=True)
            assert words["title"] == node["display_name"]
            assert words["description"] == node["description"]
            assert sorted(map(tuple, words["inputs"])) == sorted(inputs)
            assert {key for key, _ in inputs} <= set(words["labels"])
            assert words["outputs"] == [list(pair) for pair in outputs]
        x, y = page.evaluate(TITLE_IN_SIGHT, "Ref2VTrainRefiner")
        page.wait_for_timeout(300)
        page.mouse.click(x, y, button="right")
        menu = page.locator(".litemenu-title")
        menu.wait_for()
        assert menu.inner_text() == "Train Refiner"
