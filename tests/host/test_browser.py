"""The real front end in Chromium: what a person sees, drags, types and clicks."""

import json
import re
from pathlib import Path

import pytest

from tests.host.browser import HOW_TO_INSTALL, find_chromium, front_end
from tests.host.server import PACK, PACK_NAME
from tests.host.workflows import NAMES, PICTURES, api, make_inputs, ui

pytestmark = pytest.mark.skipif(find_chromium() is None, reason=HOW_TO_INSTALL)

OLDER = Path(__file__).parent / "older_workflows"  # NAME.COMMIT.json and .api.json, as they were in that commit

# A point on a node, given from its corner in the graph's own units, as a point on the screen.
ON_SCREEN = """
([id, dx, dy]) => {
    const node = app.graph.getNodeById(id), {offset, scale} = app.canvas.ds
    const box = app.canvas.canvas.getBoundingClientRect()
    return [box.left + (node.pos[0] + dx + offset[0]) * scale, box.top + (node.pos[1] + dy + offset[1]) * scale]
}
"""
WIDGET = "([id, name]) => app.graph.getNodeById(id).widgets.find(widget => widget.name === name)"
WIDGET_AT = f"([id, name]) => [app.graph.getNodeById(id).size[0] - 70, ({WIDGET})([id, name]).y + 10]"

CHINESE = "[\u4e00-\u9fff]+"

SIZES = "() => app.graph.nodes.map(node => [node.title, ...[...node.size].map(Math.round)])"

OPEN = "async ([graph, name]) => { await app.loadGraphData(graph, true, true, name) }"
COMPLAINTS = (
    "() => app.graph.nodes.filter(node => node.has_errors || !node.constructor.nodeData).map(node => node.type)"
)


class Person:
    """A page, and what a person does with mouse and keyboard."""

    def __init__(self, page):
        self.page = page
        self.errors = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def at(self, node: int, dx: float, dy: float) -> tuple[float, float]:
        return tuple(self.page.evaluate(ON_SCREEN, [node, dx, dy]))

    def open(self, name: str):
        self.page.evaluate(OPEN, [ui(name), name])
        self.page.wait_for_timeout(300)

    def value(self, node: int, widget: str):
        return self.page.evaluate(f"given => ({WIDGET})(given).value", [node, widget])

    def type(self, node: int, widget: str, text: str):
        """Double click on a widget, type, Enter."""
        self.page.mouse.dblclick(*self.at(node, *self.page.evaluate(WIDGET_AT, [node, widget])))
        box = self.page.locator(".graphdialog input")
        box.fill(text)  # into this very box: keys sent to the page can arrive before it has the focus
        box.press("Enter")
        box.wait_for(state="detached")

    def drag(self, node: int, dx: float, dy: float):
        x, y = self.at(node, 90, -15)
        self.page.mouse.move(x, y)
        self.page.mouse.down()
        self.page.mouse.move(x + dx, y + dy, steps=6)
        self.page.mouse.up()

    def read_help(self, node: int) -> str:
        """Click on a node, then on the i over it; the text of the page that opens."""
        self.page.mouse.click(*self.at(node, 90, -15))
        self.page.get_by_test_id("info-button").click()
        help_page = self.page.locator(".node-help-content")
        help_page.locator("table, ul").first.wait_for()
        return help_page.inner_text()


@pytest.fixture
def person(host, request, tmp_path):
    """A person before the front end, in the language and on the visit that the test is marked with."""
    marked = request.node.get_closest_marker("parametrize")
    given = request.node.callspec.params if marked else {}
    with front_end(host, locale=given.get("language", "en-US"), first_visit=given.get("first_visit", False)) as page:
        yield Person(page)
        page.screenshot(path=tmp_path / "last.png")  # pytest keeps it for a while


# ------------------------------------------------------------------------------------------------------- the workflows


def test_every_workflow_opens_whole_and_exports_what_the_api_file_says(person):
    for name in NAMES:
        person.open(name)
        # the notes are nodes of the front end alone
        assert set(person.page.evaluate(COMPLAINTS)) <= {"MarkdownNote"}, name
        assert person.page.locator(".p-dialog").count() == 0, f"{name}: {person.page.locator('.p-dialog').inner_text()}"
        exported = json.loads(person.page.evaluate("async () => JSON.stringify((await app.graphToPrompt()).output)"))
        assert exported == api(name), name
    assert person.errors == []


def test_older_files_of_ours_open_as_they_were_meant(host, person):
    """As they were committed: `start_from` and `lora_rank` had come in before `more`, seeds had a widget more."""
    schemas = host.object_info()
    names = sorted(path.stem for path in OLDER.glob("*.json") if ".api" not in path.stem)
    assert len(names) >= 4
    for name in names:
        graph, meant = (json.loads((OLDER / f"{name}{kind}.json").read_text(encoding="utf-8")) for kind in ("", ".api"))
        person.page.evaluate(OPEN, [graph, name])
        person.page.wait_for_timeout(300)
        exported = json.loads(person.page.evaluate("async () => JSON.stringify((await app.graphToPrompt()).output)"))
        assert exported.keys() == meant.keys()
        for node, entry in meant.items():
            if entry["class_type"].startswith("Ref2V"):
                opened = exported[node]["inputs"]
                assert {key: opened[key] for key in entry["inputs"]} == entry["inputs"], f"{name}: {node} has moved"
                schema = schemas[entry["class_type"]]["input"]
                declared = {**schema.get("required", {}), **schema.get("optional", {})}
                later = {key: opened[key] for key in opened.keys() - entry["inputs"].keys()}
                defaults = {key: declared[key][1]["default"] for key in later}
                assert later == defaults, f"{name}: what came later is not at its default"
    assert person.errors == []


@pytest.mark.parametrize("first_visit", [True])
def test_a_person_trains_a_refiner_from_the_template_browser(host, person, first_visit):
    make_inputs(host.base / "input")
    page = person.page
    page.get_by_text(PACK_NAME).click()
    page.get_by_test_id("template-workflow-train_refiner").click()
    page.wait_for_function("() => app.graph.nodes.some(node => node.type === 'Ref2VTrainRefiner')")
    page.wait_for_function("() => !document.querySelector('.p-dialog')")

    before = page.evaluate("() => [...app.graph.getNodeById(4).pos]")
    person.drag(4, 35, 70)
    after = page.evaluate("() => [...app.graph.getNodeById(4).pos]")
    assert [round((b - a) * 0.7) for a, b in zip(before, after, strict=True)] == [35, 70]  # the template opens at 70 %

    wanted = {3: {"name": "browser", "folder": PICTURES, "width": "64", "height": "64", "held_out": "2"}}
    wanted[4] = {"run_name": "browser", "epochs": "1", "batch_size": "4", "crop": "32"}
    for node, values in wanted.items():
        for widget, text in values.items():
            person.type(node, widget, text)
            assert str(person.value(node, widget)) == text

    sizes = page.evaluate(SIZES)
    page.get_by_role("button", name="Run", exact=True).click()
    page.wait_for_function("() => app.graph.getNodeById(7).imgs?.[0]?.naturalWidth === 640", timeout=300_000)
    page.wait_for_function(f"() => /Measured on/.test(({WIDGET})([4, 'ref2v_text']).value)")
    assert "training pairs" in person.value(3, "ref2v_text")
    assert page.evaluate(SIZES) == sizes  # the template left room for the pictures and the text
    assert page.evaluate("() => app.graph.getNodeById(3).imgs?.[0]?.naturalWidth") > 100  # the contact sheet
    assert (host.base / "output" / "refiners" / "browser" / "refiner.safetensors").is_file()
    assert person.errors == []


def test_a_mistake_is_said_in_one_sentence(person):
    person.open("train_refiner")
    person.type(3, "folder", "there is no such folder")
    person.page.get_by_role("button", name="Run", exact=True).click()
    person.page.get_by_text("Folder does not exist: looked for").wait_for()


# ------------------------------------------------------------------------------------------------------- the languages


@pytest.mark.parametrize("language", ["en-US", "zh-CN"])
def test_help_page_of_a_node_is_ours(person, language):
    person.open("train_refiner")
    said = " ".join(person.read_help(4).split())
    page = (PACK / "web" / "docs" / "Ref2VTrainRefiner" / f"{language[:2]}.md").read_text(encoding="utf-8")
    first = page.split("\n\n")[1].splitlines()[0]
    assert first.partition("*")[0].strip() in said


@pytest.mark.parametrize("language", ["zh-CN"])
def test_in_chinese_the_nodes_have_chinese_names(person, language):
    shown = person.page.evaluate(
        """() => {
            const node = LiteGraph.createNode('Ref2VTrainRefiner')
            const label = slot => slot.label ?? slot.localized_name ?? slot.name
            return {title: node.title, widgets: node.widgets.map(label), outputs: node.outputs.map(label)}
        }"""
    )
    words = json.loads((PACK / "locales" / "zh" / "nodeDefs.json").read_text(encoding="utf-8"))
    ours, load = words["Ref2VTrainRefiner"], words["Ref2VLoadRefiner"]["display_name"]
    assert re.fullmatch(CHINESE, ours["display_name"]) and shown["title"] == ours["display_name"]
    assert shown["widgets"][:3] == [ours["inputs"][name]["name"] for name in ("dataset", "run_name", "preset")]
    assert shown["outputs"] == [ours["outputs"][index]["name"] for index in "012"]

    person.page.mouse.dblclick(800, 850)  # the search box of an empty place
    person.page.keyboard.type(load[2:4], delay=30)  # the word for "refine" in "load refiner"
    person.page.get_by_text(load).first.wait_for()


def test_nothing_of_ours_changes_its_seed_by_itself(person):
    """A new seed after each run would be another dataset and another training run, without anyone having asked."""
    restless = person.page.evaluate(
        """() => Object.keys(LiteGraph.registered_node_types).filter(type => type.startsWith('Ref2V')
            && LiteGraph.createNode(type).widgets?.some(widget => widget.name === 'control_after_generate'))"""
    )
    assert restless == []
