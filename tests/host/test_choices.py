"""A client of the queue may send anything for a combo: one sentence with the choices, for every combo of every node."""

from tests.host.checkpoints import MIN
from tests.host.client import PromptRefused
from tests.host.server import PACK_NAME

WRONG = "no such choice"
_FROM_CHECKPOINT = {"MODEL": 0, "CLIP": 1, "VAE": 2}


def whole_prompt(nodes: dict, name: str, changed: dict) -> dict:
    """A prompt that runs node `name` with its defaults, but for `changed`; what it must be linked to comes first."""
    prompt = {}

    def link(kind: str) -> list:
        if kind in _FROM_CHECKPOINT:
            prompt["load"] = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": MIN}}
            return ["load", _FROM_CHECKPOINT[kind]]
        if kind == "CONDITIONING":
            prompt["text"] = {"class_type": "CLIPTextEncode", "inputs": {"clip": link("CLIP"), "text": ""}}
            return ["text", 0]
        if kind == "LATENT":
            empty = {"width": 64, "height": 64, "batch_size": 1}
            prompt["latent"] = {"class_type": "EmptyLatentImage", "inputs": empty}
            return ["latent", 0]
        if kind == "IMAGE":
            prompt["image"] = {
                "class_type": "EmptyImage",
                "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 0},
            }
            return ["image", 0]
        maker = next(each for each, info in nodes.items() if kind in info["output"])  # a type of ours
        prompt[kind] = {"class_type": maker, "inputs": inputs(maker, {})}
        return [kind, nodes[maker]["output"].index(kind)]

    def inputs(node: str, given: dict) -> dict:
        found = dict(given)
        for each, (kind, *more) in nodes[node]["input"].get("required", {}).items():
            options = more[0] if more else {}
            if each in found:
                continue
            if kind in ("INT", "FLOAT", "BOOLEAN"):
                found[each] = options["default"]
            elif kind == "STRING":
                found[each] = options.get("default", "")
            elif kind == "COMBO":
                found[each] = options.get("default", options["options"][0])
            else:
                found[each] = link(kind)
        return found

    prompt["asked"] = {"class_type": name, "inputs": inputs(name, changed)}
    if not nodes[name]["output_node"]:
        prompt["shown"] = {"class_type": "PreviewAny", "inputs": {"source": ["asked", 0]}}
    return prompt


def combos(info: dict) -> list[str]:
    given = {**info["input"].get("required", {}), **info["input"].get("optional", {})}
    return [each for each, (kind, *_) in given.items() if kind == "COMBO"]


def test_a_choice_that_is_in_no_list_is_refused_in_one_sentence(host):
    nodes = {name: info for name, info in host.object_info().items() if PACK_NAME in info["python_module"]}
    asked, own_words, wrong = 0, [], []
    for name, info in nodes.items():
        for combo in combos(info):
            asked += 1
            try:
                result = host.run(whole_prompt(nodes, name, {combo: WRONG}))
            except PromptRefused as refused:  # a host that compares the lists itself
                assert WRONG in str(refused)
                continue
            said = str(result.error or "")
            if result.status == "success" or f"BadInput: {combo} must be one of " not in said or WRONG not in said:
                own_words.append(f"{name}.{combo}")
                if result.status != "success" and "BadInput: " not in said:
                    wrong.append(f"{name}.{combo}: {said}")
    assert asked >= 25 and wrong == []
    # These look a name up themselves: a file that is gone, a dtype or an encoder that only a newer version knows.
    assert {each.split(".")[0] for each in own_words} <= {
        "Ref2VLoadRefiner", "Ref2VLoadVAE", "Ref2VSelectVAEPrecision", "Ref2VSelectCLIPPrecision",
        "Ref2VSelectModelPrecision", "Ref2VAuditPrecision",
    }, own_words  # fmt: skip
