"""What a path from a graph may mean, tried with the host's real folders. See in_host.py for how it is run."""

import json
import os
import shutil
from pathlib import Path

from in_host import WORK, pack, refusal, write_results

paths = pack("nodes.host.paths")
BASE = Path(WORK.name)


def lay_out():
    """A host's folders with something in them, and links that stay inside and lead out."""
    outside = BASE.parent / f"{BASE.name}-outside"
    for folder in ("input/pictures", "output/refiner_datasets/data", "models/refiners", "temp", outside / "secret"):
        (BASE / folder).mkdir(parents=True, exist_ok=True)
    for run in ("run", "run/checkpoints", "run/.checkpoints/step-00000001", "run.previous-1"):
        (BASE / "output/refiners" / run).mkdir(parents=True, exist_ok=True)
        (BASE / "output/refiners" / run / "refiner.safetensors").write_bytes(b"x")
        (BASE / "output/refiners" / run / "lora.safetensors").write_bytes(b"x")
    (BASE / "models/refiners/shared.safetensors").write_bytes(b"x")
    (BASE / "models/refiners/notes.txt").write_bytes(b"x")
    for link, target in (("input/out", outside), ("input/in", BASE / "input/pictures")):
        if not (BASE / link).is_symlink():
            (BASE / link).symlink_to(target, target_is_directory=True)
    return outside


def resolved(text):
    """Where the text leads, relative to the host's base folder, or the sentence."""
    found = []
    said = refusal(lambda: found.append(paths.resolve_inside(text, "the folder")))
    return os.path.relpath(found[0], os.path.realpath(BASE)) if found else said


def check_inside():
    lay_out()
    texts = {
        "bare input": "pictures",
        "bare output": "refiner_datasets/data",
        "named output": "output/refiner_datasets/data",
        "quoted": ' "pictures" ',
        "absolute": str(BASE / "input/pictures"),
        "link inside": "in",
        "dots inside": "pictures/../pictures",
        "model": "models/refiners/shared.safetensors",
        "from Windows": "refiner_datasets\\data",
        "named, from Windows": "output\\refiner_datasets\\data",
        "named in capitals": "Output/refiner_datasets/data",
    }
    return {name: resolved(text) for name, text in texts.items()}


def check_outside():
    outside = lay_out()
    texts = {
        "absolute": str(outside),
        "absolute, nothing there": str(outside / "none"),
        "dots": f"../../{outside.name}",
        "absolute dots": f"{BASE}/input/../../{outside.name}",
        "link": "out/secret",
        "link, nothing there": "out/none",
        "sibling of a root": f"{BASE}/input-other",
        "code": str(BASE / "custom_nodes"),
    }
    return {name: resolved(text) for name, text in texts.items()}


def check_nothing():
    lay_out()
    return {"empty": resolved(" "), "absent": resolved("pictures/none"), "zero byte": resolved("a\0b")}


def check_config():
    outside = lay_out()
    file = paths.config_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    found = {"before": resolved(str(outside / "secret"))}
    contents = {
        "allowed": json.dumps({"roots": [str(outside)]}),
        "no JSON": "{",
        "no list": '{"roots": "x"}',
        "a list": "[]",
        "relative": '{"roots": ["data"]}',
    }
    for name, content in contents.items():
        file.write_text(content)
        found[name] = resolved(str(outside / "secret"))
    file.unlink()
    return found


def check_names():
    names = [
        "a run-1_b.c",
        "\u56fe\u7247",
        "\u0939\u093f\u0928\u094d\u0926\u0940",
        "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22\u0e17\u0e35\u0e48",
        "\u0ba4\u0bae\u0bbf\u0bb4\u0bcd",
        "de\u0301ja\u0300",
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
        "a\u200bb",
        "a\u0007b",
        "",
        " ",
        "a/b",
        "a\\b",
        "..",
        ".x",
        "x.",
        "con",
        "NUL.txt",
        "x" * 201,
        "checkpoints",
    ]
    return {name: refusal(lambda name=name: paths.check_name(name, "run_name")) for name in names}


def check_one_name_in_two_spellings():
    return paths.check_name("de\u0301ja\u0300", "run_name") == "d\u00e9j\u00e0"


def check_names_on_windows():
    paths._IS_WINDOWS = True
    try:
        longest = 259 - len(str(paths.run_folder("x"))) - len("/") - len(paths._LONGEST_IN_RUN) + 1
        return {
            "fits": refusal(lambda: paths.run_folder("x" * longest)),
            "one more": refusal(lambda: paths.run_folder("x" * (longest + 1))),
            "dataset": refusal(lambda: paths.dataset_folder("x" * 200)),
        }
    finally:
        paths._IS_WINDOWS = False


def check_what_the_host_lists():
    """Its own lists of models: of the node menu, and of the Model Library."""
    from app.model_manager import ModelFileManager

    lay_out()
    paths.register_model_folder()
    library = {entry["name"] for entry in ModelFileManager().get_model_file_list("refiners")}
    return {"library": sorted(library), "menu": sorted(paths.folder_paths.get_filename_list("refiners"))}


def check_a_name_with_the_other_separator():
    lay_out()
    choice = pack("nodes.host.refiner.choice")
    found = [choice.choose_refiner("run.previous-1\\refiner.safetensors", None)]
    found += [choice.start_file("run.previous-1\\refiner.safetensors")]
    for kind in ("vae", "checkpoints"):
        (BASE / "models" / kind / "sub").mkdir(parents=True, exist_ok=True)
        (BASE / "models" / kind / "sub" / "x.safetensors").write_bytes(b"x")
    vae_path = pack("nodes.host.vae.file")._path
    found += [vae_path("sub\\x.safetensors"), vae_path("checkpoints/sub\\x.safetensors")]
    return [os.path.relpath(path, BASE) for path in found]


def check_a_run_that_says_it_starts_outside():
    """A client of the host can write config.json into a run's folder."""
    outside = lay_out()
    training = pack("nodes.host.refiner.training")
    secret, run = outside / "secret" / "x.safetensors", BASE / "output/refiners/run"
    config = {"config": {"refiner": {"start_from": str(secret)}}}
    (run / "config.json").write_text(json.dumps(config))
    prints = []
    for content in (None, b"1", b"22"):
        if content is not None:
            secret.write_bytes(content)
        prints.append(training.fingerprint("run", None))
    said = refusal(lambda: training._start_of(run))
    (run / "config.json").unlink()
    return {"prints": len(set(prints)), "said": said}


def check_options_of_a_person():
    parse = pack("nodes.host.refiner.training")._parse_options
    twice = refusal(lambda: parse('{"data": {"repeats": 2}, "flow": {}, "data": {"mirror": true}}'))
    return {"twice": twice, "marked": parse('\ufeff{"data": {"repeats": 2}}')}


def check_datasets_of_a_name():
    recipe = pack("nodes.host.dataset.recipe")
    for folder in ("a-0123456789", "a-b-0123456789", "a-0123456789.previous-1", "a-b"):
        (BASE / "output/refiner_datasets" / folder).mkdir(parents=True, exist_ok=True)
        (BASE / "output/refiner_datasets" / folder / "index.json").write_text("{}")
    return [line.split()[0] for name in ("a", " a ", "a-b") for line in recipe.built_datasets(name)[:-1]]


def check_wording():
    outside = lay_out()
    wording, base = pack("nodes.host.wording"), str(BASE)
    kinds = paths.folder_paths.folder_names_and_paths
    kinds["ref2v_test"] = ([str(outside / "loras")], set())
    texts = {
        "output": f"The dataset {base}/output/refiner_datasets/a (x) and {base}/output.",
        "input": f"looked for {base}/input/x and '{base}/output/x'",
        "models": f"no file in {base}/models/refiners or {base}/models/vae/x",
        "user": f"listed in {paths.config_file()}",
        "elsewhere": f"{outside}/loras/x.safetensors is bad",
        "another": f"{base}/output-other/x and /mnt{base}/input",
    }
    found = {name: wording.for_people(text).replace(base, "BASE") for name, text in texts.items()}
    del kinds["ref2v_test"]
    node = pack("nodes.refiner").Ref2VLoadRefiner
    for _ in range(2):
        node.define_schema()
    run = BASE / "output/refiners/run"
    found["node"] = refusal(lambda: node.execute("x", 1.0, path=str(run)))
    found["signature"] = str(__import__("inspect").signature(node.execute))
    return found


def check_refiners():
    lay_out()
    paths.register_model_folder()
    paths.register_model_folder()  # the host's front end can reload the pack: no folder twice
    aside = paths.move_aside(BASE / "output/refiners/run")
    return {
        "list": paths.list_refiners(),
        "folders": len(set(paths.folder_paths.get_folder_paths("refiners"))),
        "entries": len(paths.folder_paths.get_folder_paths("refiners")),
        "file": os.path.relpath(paths.refiner_file("shared.safetensors"), BASE),
        "gone": refusal(lambda: paths.refiner_file("gone.safetensors")),
        "out": refusal(lambda: paths.refiner_file("../../input/pictures")),
        "aside": aside.name,
    }


if __name__ == "__main__":
    write_results({name.removeprefix("check_"): run for name, run in list(globals().items()) if name[:6] == "check_"})
    shutil.rmtree(BASE.parent / f"{BASE.name}-outside")
