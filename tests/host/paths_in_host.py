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
    for run in ("run", "run/checkpoints", "run.previous-1"):
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
