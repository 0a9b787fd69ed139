"""Every name and tooltip of every node, in English and in Chinese."""

import json
import re

import pytest

from tests.host.server import PACK, PACK_NAME

SPECIAL = frozenset("{}@|")  # front ends read these in a translation as their own, not in a schema
LANGUAGES = sorted(folder.name for folder in (PACK / "locales").iterdir())


def locale(language: str, file: str) -> dict:
    return json.loads((PACK / "locales" / language / f"{file}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def nodes(host) -> dict:
    """The locale entries that the nodes themselves ask for: in English, what their schemas say."""
    return {
        name: {
            "display_name": node["display_name"],
            "description": node["description"],
            "inputs": {
                key: {"name": key, "tooltip": spec[1]["tooltip"]}
                for kind in ("required", "optional")
                for key, spec in node["input"].get(kind, {}).items()
            },
            "outputs": {
                str(i): {"name": shown, "tooltip": tooltip}
                for i, (shown, tooltip) in enumerate(zip(node["output_name"], node["output_tooltips"], strict=True))
            },
        }
        for name, node in sorted(host.object_info().items())
        if PACK_NAME in node["python_module"]
    }


def leaves(entry: dict, prefix: str = "") -> dict[str, str]:
    """{"inputs.base.tooltip": text, ...}, in order."""
    found = {}
    for key, value in entry.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def test_there_are_both_languages():
    assert LANGUAGES == ["en", "zh"]


def test_chinese_has_a_name_and_a_tooltip_for_everything(nodes):
    # both ways: nothing is missing, and nothing is left over from a node that changed
    assert sorted(leaves(locale("zh", "nodeDefs"))) == sorted(leaves(nodes))


def test_english_repeats_nothing_of_the_schemas_but_the_names(nodes):
    """The front end of 0.3.75 looks for the name over a node's menu here alone; test_text_on_nodes.py looks at it."""
    assert all(text.strip() for text in leaves(nodes).values())
    names = {name: {"display_name": entry["display_name"]} for name, entry in nodes.items()}
    assert locale("en", "nodeDefs") == names


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_text_holds_a_sign_that_some_front_ends_read_as_their_own(language):
    for file in ("nodeDefs", "main"):
        texts = leaves(locale(language, file)).values()
        assert all(text.strip() and not SPECIAL & set(text) for text in texts)


def test_inputs_stand_in_the_order_of_the_node(nodes):
    for name, entry in locale("zh", "nodeDefs").items():
        assert list(entry["inputs"]) == list(nodes[name]["inputs"]), name


def test_chinese_is_chinese_and_speaks_of_the_same_words(nodes):
    english, chinese = leaves(nodes), leaves(locale("zh", "nodeDefs"))
    for key, text in chinese.items():
        if key.endswith(("tooltip", "description", "display_name")):
            assert re.search("[\u4e00-\u9fff]", text), f"{key}: {text}"
        # values that a person types or picks stay as they are
        for word in ("sd15-half", "start over", "models/refiners", "refiner.safetensors", "bf16"):
            assert (word in english[key]) == (word in text), f"{key} and the word {word}"


@pytest.mark.parametrize("language", LANGUAGES)
def test_categories_and_types_have_a_name(host, language):
    ours = [node for node in host.object_info().values() if PACK_NAME in node["python_module"]]
    parts = {part for node in ours for part in node["category"].split("/")}
    assert set(locale(language, "main")["nodeCategories"]) == parts
    assert set(locale(language, "main")["dataTypes"]) == {kind for n in ours for kind in n["output"] if "REF2V" in kind}


def test_host_serves_them(host):
    served = host.get("/i18n")
    assert set(LANGUAGES) <= set(served)
    for language in LANGUAGES:
        for name, entry in locale(language, "nodeDefs").items():
            assert served[language]["nodeDefs"][name] == entry


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_node_has_a_help_page_that_knows_its_inputs(host, nodes, language):
    words = nodes if language == "en" else locale("zh", "nodeDefs")
    for name, entry in words.items():
        page = host.request(f"/extensions/{PACK_NAME}/docs/{name}/{language}.md").decode("utf-8")
        assert page.startswith(f"# {entry['display_name']}\n")
        for described in entry["inputs"].values():
            parts = re.split(r"\W+", described["name"])  # the Chinese for "before folder" has quotation marks
            assert all(part.lower() in page.lower() for part in parts), f"{name}: {described['name']}"
    assert sorted(nodes) == sorted(folder.name for folder in (PACK / "web" / "docs").iterdir())
