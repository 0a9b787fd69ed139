"""The pack is loaded again and again, each time in a host that lacks something; test_loading.py runs it.

Every case is a fork of one booted host, so that what it takes away from the host is gone in that case alone.
"""

import ast
import asyncio
import importlib
import importlib.util
import inspect
import json
import logging
import os
import sys
import textwrap
import types

from in_host import PACK, pack, write_results

HOST_PACKAGES = ("comfy", "comfy_execution", "comfy_extras")


def in_a_fork(case):
    """What case() returns in a fork of this process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = json.dumps(case())
        except BaseException as problem:
            answer = json.dumps({"failed": f"{type(problem).__name__}: {problem}"})
        with os.fdopen(write, "w") as out:
            out.write(answer)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answered:
        answer = answered.read()
    os.waitpid(child, 0)
    return json.loads(answer)


def load_again(name: str = "again") -> tuple[list[type], list[str]]:
    """(the nodes that the host would be given, the lines that it would find in its log)."""
    lines = []
    keep = logging.Handler()
    keep.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("ref2v").addHandler(keep)
    spec = importlib.util.spec_from_file_location(name, PACK / "__init__.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return asyncio.run(module.comfy_entrypoint().get_node_list()), lines


def hide(module: str, name: str = "") -> None:
    """Take a name away from a module of the host, or the module itself."""
    if name:
        delattr(importlib.import_module(module), name)
        return
    parent, _, last = module.rpartition(".")
    importlib.import_module(module)
    sys.modules[module] = None
    if parent:
        delattr(sys.modules[parent], last)


def host_names() -> list[tuple[str, str]]:
    """(module, name) of all that nodes/host takes from the host by name: `from comfy.hooks import Hook`."""
    found = set()
    for path in sorted((PACK / "nodes" / "host").rglob("*.py")):
        for each in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(each, ast.ImportFrom) and not each.level and each.module.split(".")[0] in HOST_PACKAGES:
                found |= {(each.module, alias.name) for alias in each.names}
    return sorted(found)


def cannot_run(node: type) -> str:
    """Why `node` cannot import what it needs to run, or ""."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(node.execute)))
    package = sys.modules[node.__module__].__package__
    try:
        for each in ast.walk(tree):
            if isinstance(each, ast.ImportFrom):
                module = importlib.import_module("." * each.level + each.module, package)
                [getattr(module, alias.name) for alias in each.names]
    except (ImportError, AttributeError) as problem:
        return str(problem)
    return ""


def without_each_name() -> dict:
    """{host name: {"nodes": loaded ones, "cannot run": those of them, "log": lines}} with that name gone."""
    importlib.import_module("comfy.sd")  # as a booted host has it
    for node in load_again("once")[0]:
        cannot_run(node)  # so that no fork imports what does not matter here

    def case(module, name):
        hide(module, name)
        nodes, lines = load_again()
        broken = [node.GET_SCHEMA().node_id for node in nodes if cannot_run(node)]
        loaded = [node.GET_SCHEMA().node_id for node in nodes]
        return {"nodes": loaded, "cannot run": sorted(broken), "log": lines}

    return {f"{module}.{name}": in_a_fork(lambda m=module, n=name: case(m, n)) for module, name in host_names()}


def without_a_schema_class() -> dict:
    """A class of the schema API is gone, which one node has an output of."""

    def case():
        io = pack("nodes.host.api").io
        del io.Sigmas
        nodes, lines = load_again()
        return {"nodes": [node.GET_SCHEMA().node_id for node in nodes], "log": lines}

    return in_a_fork(case)


def with_a_broken_family() -> dict:
    """A file of nodes cannot be imported, whatever the reason."""

    def case():
        sys.modules["again.nodes.memory.model"] = None
        nodes, lines = load_again()
        return {"nodes": [node.GET_SCHEMA().node_id for node in nodes], "log": lines}

    return in_a_fork(case)


def only_latest() -> dict:
    """A host that has dropped the version of the API that we ask for."""

    def case():
        hide("comfy_api.v0_0_2")
        nodes, lines = load_again()
        return {"nodes": len(nodes), "log": lines}

    return in_a_fork(case)


def latest_changed() -> dict:
    """A host whose newest API has other names, while the fixed version is as it was."""

    def case():
        importlib.import_module("comfy_api.v0_0_2")
        latest = importlib.import_module("comfy_api.latest")
        del latest.io, latest.ui, latest.ComfyExtension
        nodes, lines = load_again()
        return {"nodes": len(nodes), "log": lines}

    return in_a_fork(case)


def of_versions() -> dict:
    """{version of the host: lines in its log}; None: it does not say."""

    def case(version):
        import comfyui_version

        if version is None:
            del comfyui_version.__version__
        else:
            comfyui_version.__version__ = version
        return load_again()[1]

    versions = ("0.3.64", "0.3.75", "0.3.100", "0.38.0", "1.0.0", "nightly", None)
    return {str(version): in_a_fork(lambda v=version: case(v)) for version in versions}


def folder_names() -> dict:
    """{names of folders that a host looks for workflows in: those after the pack is loaded}; made of names alone."""

    def case(names):
        manager = types.ModuleType("app.custom_node_manager")
        manager.EXAMPLE_WORKFLOW_FOLDER_NAMES = list(names)
        sys.modules["app.custom_node_manager"] = manager
        load_again()
        return manager.EXAMPLE_WORKFLOW_FOLDER_NAMES

    known = (["example_workflows"], ["example_workflows", "workflows"])
    return {" ".join(names): in_a_fork(lambda n=names: case(n)) for names in known}


def a_node_that_cannot_run() -> dict:
    """What a person reads who runs a node that this host cannot hold."""

    def case():
        hide("comfy.ldm.flux.model", "Flux")
        nodes, _ = load_again()
        (node,) = (node for node in nodes if node.GET_SCHEMA().node_id == "Ref2VEstimateModelMemory")
        try:
            node.execute()
        except Exception as problem:
            return {"kind": type(problem).__name__, "said": str(problem)}
        return {"said": ""}

    return in_a_fork(case)


CHECKS = {
    "without_each_name": without_each_name,
    "without_a_schema_class": without_a_schema_class,
    "with_a_broken_family": with_a_broken_family,
    "only_latest": only_latest,
    "latest_changed": latest_changed,
    "of_versions": of_versions,
    "folder_names": folder_names,
    "a_node_that_cannot_run": a_node_that_cannot_run,
}

if __name__ == "__main__":
    write_results(CHECKS)
