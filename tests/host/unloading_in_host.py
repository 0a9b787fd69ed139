"""The host's models unloaded while one of them is garbage. See in_host.py for how it is run."""

import gc

from in_host import comfy, pack, torch, write_results
from torch.nn import Linear

training = pack("nodes.host.refiner.training")
CPU = torch.device("cpu")


class Collecting(comfy.model_patcher.ModelPatcher):
    """The host's patcher; the collector runs inside its `detach`, as it may by itself at any allocation."""

    def detach(self, unpatch_all=True):
        gc.collect()
        return super().detach(unpatch_all)


def load(patcher_class=comfy.model_patcher.ModelPatcher):
    patcher = patcher_class(Linear(8, 8), load_device=CPU, offload_device=CPU)
    comfy.model_management.load_models_gpu([patcher])
    return patcher


def check_garbage_among_the_loaded_models():
    gc.disable()  # or the garbage might go before its time
    loaded = comfy.model_management.current_loaded_models
    kept = [load(Collecting)]
    for _ in range(2):
        garbage = load()
        garbage.model.itself = garbage.itself = garbage.model_options["itself"] = garbage  # only the collector frees it
        del garbage
    kept.append(load(Collecting))
    before = len(loaded)
    with training._room_to_train():
        inside = len(loaded)
    gc.enable()
    return {"before": before, "inside": inside, "kept": len(kept)}


def check_the_collector_goes_on_afterwards():
    with training._room_to_train():
        pass
    return gc.isenabled()


if __name__ == "__main__":
    write_results({name.removeprefix("check_"): run for name, run in list(globals().items()) if name[:6] == "check_"})
